"""What ``kvfs top`` draws of one mount: a line for the whole, and one for each directory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.cache_table import shown_time
from kvfs.core.cache_rates import Rates, busiest
from kvfs.core.printable import printable
from kvfs.core.sizes import format_size, shown_rate

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS: Final = ("hit rate", "hits/s", "misses/s", "loaded/s", "stored/s", "so far", "evicted/s")
#: ``1023.99 MiB`` and a space.
_COLUMN_WIDTH: Final = 12
_NAME_COLUMNS: Final = 14


def screen(
    status: Mapping[str, Any], found: Mapping[str, Any], lines_max: int, columns: int
) -> "Table":
    """Return the table of one mount: its *status*, and the rates *found* since the last look.

    At most *lines_max* directories, the busiest first. It leaves out what *columns* have no room
    for, because a figure over two lines cannot be read.
    """
    from rich.table import Table

    table = Table(
        title=_heading(status),
        box=None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
    )
    table.add_column("directory", overflow="fold", min_width=_NAME_COLUMNS)
    for column in _COLUMNS[: max(1, (columns - _NAME_COLUMNS) // _COLUMN_WIDTH)]:
        table.add_column(column, justify="right", no_wrap=True)
    shown = len(table.columns) - 1
    cache = status["cache"]
    table.add_row("(all)", *_cells(found["total"], cache["hit_rate"])[:shown], style="bold")
    for name, rates in busiest(found["directories"], lines_max):
        so_far = cache["directories"].get(name, {}).get("hit_rate")
        table.add_row(printable(name), *_cells(rates, so_far)[:shown])
    hidden = len(found["directories"]) - lines_max
    if hidden > 0:
        table.add_row(f"({hidden} more)")
    return table


def _heading(status: Mapping[str, Any]) -> str:
    used, capacity = format_size(status["used_bytes"]), format_size(status["capacity_bytes"])
    device = status["cache"].get("device", {})  # the running server may be an older one
    parts = [f"{used} of {capacity}", f"{status['blocks']:,} blocks"]
    if device.get("write_rate") is not None:
        parts.append(f"{format_size(int(device['write_rate']))}/s written to the device")
    if device.get("endurance_left") is not None:
        parts.append(f"{shown_rate(device['endurance_left'])} of its endurance left")
    parts.append(f"up {shown_time(status['cache']['uptime_s'])}")
    return f"{printable(str(status['mountpoint']))}   {', '.join(parts)}"


def _cells(rates: Rates, so_far: float | None) -> list[str]:
    loaded, stored, evicted = (
        format_size(int(rates[f"{kind}_bytes"] or 0)) for kind in ("loaded", "stored", "evicted")
    )
    counts = [f"{rates[kind] or 0:,.0f}" for kind in ("hits", "misses")]
    return [shown_rate(rates["hit_rate"]), *counts, loaded, stored, shown_rate(so_far), evicted]
