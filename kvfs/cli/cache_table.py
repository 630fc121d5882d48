"""The tables of ``kvfs status`` about the cache: hits and misses, evictions, each directory."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from kvfs.core.printable import printable
from kvfs.core.sizes import format_size


def cache_rows(cache: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of the whole cache for a reader: label and value."""
    evicted = [
        f"{reason} {each['blocks']:,} ({format_size(each['bytes'])})"
        for reason, each in cache["evicted"].items()
        if each["blocks"]
    ]
    stored = f"{cache['stored_blocks']:,} blocks, {format_size(cache['stored_bytes'])}"
    return [
        ("hit rate", shown_rate(cache["hit_rate"])),
        ("hits", f"{cache['hits']:,}, {format_size(cache['loaded_bytes'])} loaded"),
        ("misses", f"{cache['misses']:,}"),
        ("stored", stored),
        ("evicted", ", ".join(evicted) or "-"),
        ("counted for", f"{cache['uptime_s']:,.0f} s"),
    ]


def tally_tables(cache: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table with a line for each directory, and one for each model if any is known."""
    for heading, tallies in (("directory", cache["directories"]), ("model", cache["models"])):
        if tallies:
            yield _tally_table(heading, tallies)


def shown_rate(rate: float | None) -> str:
    """Return a share as a percentage, a dash if there is none yet."""
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _tally_table(heading: str, tallies: Mapping[str, Any]) -> Table:
    table = Table(box=None, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column(heading, overflow="fold")
    for column in ("hit rate", "hits", "misses", "loaded", "stored", "evicted"):
        table.add_column(column, justify="right")
    for name, each in tallies.items():
        table.add_row(
            printable(name),
            shown_rate(each["hit_rate"]),
            f"{each['hits']:,}",
            f"{each['misses']:,}",
            *(format_size(each[f"{kind}_bytes"]) for kind in ("loaded", "stored", "evicted")),
        )
    return table
