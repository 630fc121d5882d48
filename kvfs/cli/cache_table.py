"""The tables of ``kvfs status`` about the cache: hits and misses, evictions, each directory."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvfs.cli.plain_table import Column, headed, table_lines
from kvfs.core.printable import printable
from kvfs.core.sizes import format_size, shown_rate

#: Length of the bar for a hit rate of 100 %.
_BAR_COLUMNS: Final = 40


def cache_rows(cache: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of the whole cache for a reader: label and value.

    A server that is older than the command may lack some.
    """
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
        ("unused at eviction", _shown_ages(cache.get("age_at_eviction", {}))),
        ("missed again after", _shown_ages(cache.get("missed_after_eviction", {}))),
        ("written to the device", _shown_device(cache.get("device", {}))),
        ("counted for", shown_time(cache["uptime_s"])),
    ]


def curve_lines(cache: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the hit rates of pools of other sizes: a line with a bar for each."""
    yield headed("Hit rate at other sizes of the pool (estimated)")
    rows = [
        (
            f"{point['factor']:g} x",
            format_size(point["capacity_bytes"]),
            shown_rate(point["hit_rate"]),
            "#" * round(point["hit_rate"] * _BAR_COLUMNS) or ".",
        )
        for point in cache["curve"]
    ]
    yield from table_lines((*[Column(right=True)] * 3, Column()), rows, width)


def tally_tables(cache: Mapping[str, Any], width: int) -> Iterator[Iterator[str]]:
    """Yield a table with a line for each directory, and one for each model if any is known."""
    for heading, tallies in (("directory", cache["directories"]), ("model", cache["models"])):
        if tallies:
            yield _tally_lines(heading, tallies, width)


def shown_time(time_s: float) -> str:
    """Return a time for a reader, in the largest unit of which it has at least two."""
    for unit, unit_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if time_s >= 2 * unit_s:
            return f"{time_s / unit_s:,.1f} {unit}"
    return f"{time_s:,.1f} s"


def _shown_ages(quantiles: Mapping[str, float | None]) -> str:
    """Return the quantiles of some ages: the middle one, and where most of them lie."""
    low_s, middle_s, high_s = (quantiles.get(name) for name in ("p10_s", "p50_s", "p90_s"))
    if low_s is None or middle_s is None or high_s is None:
        return "-"
    return f"{shown_time(middle_s)} (most: {shown_time(low_s)} to {shown_time(high_s)})"


def _shown_device(device: Mapping[str, Any]) -> str:
    """Return what is known of the device: bytes, rate, endurance."""
    if device.get("written_bytes") is None:
        return "-"
    parts = [format_size(device["written_bytes"])]
    if device["write_rate"] is not None:
        parts.append(f"{format_size(int(device['write_rate']))}/s now")
    if device["endurance_left"] is not None:
        parts.append(f"{shown_rate(device['endurance_left'])} of its endurance left")
    return ", ".join(parts)


def _tally_lines(heading: str, tallies: Mapping[str, Any], width: int) -> Iterator[str]:
    figures = ("hit rate", "hits", "misses", "loaded", "stored", "evicted")
    columns = (Column(heading, folds=True), *(Column(name, right=True) for name in figures))
    rows = (
        (
            printable(name),
            shown_rate(each["hit_rate"]),
            f"{each['hits']:,}",
            f"{each['misses']:,}",
            *(format_size(each[f"{kind}_bytes"]) for kind in ("loaded", "stored", "evicted")),
        )
        for name, each in tallies.items()
    )
    first, *others = table_lines(columns, rows, width)
    yield headed(first)
    yield from others
