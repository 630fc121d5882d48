"""The table of ``kvfs status`` without a MOUNT: one line a mount, what is asked first."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.table import Table

from kvfs.cli.cache_table import shown_rate
from kvfs.core.printable import printable
from kvfs.core.sizes import format_size

#: Counters of what went wrong; ``kvfs doctor`` says what to do.
_WRONG: Final = ("lost_blocks", "write_back_failures", "damaged_rows", "background_failures")


def list_of(statuses: Iterable[Mapping[str, Any]]) -> Table:
    """Return the table of the mounts with *statuses*."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MOUNT", overflow="fold")
    for heading in ("USED", "OF", "EVICTABLE", "BLOCKS", "HIT RATE"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("DATA PATH", no_wrap=True)
    table.add_column("HEALTH", no_wrap=True)
    for status in statuses:
        table.add_row(*_row(status))
    return table


def _row(status: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = (status.get(f"{name}_bytes") for name in ("used", "capacity", "evictable"))
    blocks = status.get("blocks")
    return (
        printable(str(status.get("mountpoint", "?"))),
        *("-" if size is None else format_size(size) for size in sizes),
        "-" if blocks is None else f"{blocks:,}",
        _hit_rate(status.get("cache")),
        printable(str(status.get("data_path", "?"))),
        _health(status),
    )


def _hit_rate(cache: object) -> str:
    return shown_rate(cache.get("hit_rate") if isinstance(cache, Mapping) else None)


def _health(status: Mapping[str, Any]) -> str:
    """Return in a word or two how the mount is; its details are in the tables of one mount."""
    if status.get("device_lost"):
        return "device lost"
    if any(status.get(name) for name in _WRONG):
        return "see kvfs doctor"
    if status.get("warning"):
        return "little evictable"
    return "read only" if status.get("read_only") else "ok"
