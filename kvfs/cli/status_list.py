"""The table of ``kvfs status`` without a MOUNT: one line per mount, with what people ask first."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kvfs.cli.plain_table import Column, table_lines
from kvfs.core.printable import printable
from kvfs.core.sizes import format_size, shown_rate

#: Counters of what went wrong; ``kvfs doctor`` says what to do.
_WRONG: Final = (
    "lost_blocks",
    "write_back_failures",
    "damaged_rows",
    "background_failures",
    "follow_failures",
)


_COLUMNS: Final = (
    Column("MOUNT", folds=True),
    *(Column(name, right=True) for name in ("USED", "OF", "EVICTABLE", "BLOCKS", "HIT RATE")),
    Column("DATA PATH"),
    Column("HEALTH"),
)


def list_of(statuses: Iterable[Mapping[str, Any]], columns: int) -> Iterator[str]:
    """Yield the lines of the mounts with *statuses*; a long mountpoint takes several.

    No figure is cut off, so a line may be longer than *columns*.
    """
    yield from table_lines(_COLUMNS, map(_row, statuses), columns)


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
    """Return the health of the mount in a word or two; ``kvfs status MOUNT`` has the details."""
    if status.get("device_lost"):
        return "device lost"
    if any(status.get(name) for name in _WRONG):
        return "see kvfs doctor"
    if status.get("warning"):
        return "little evictable"
    return "read only" if status.get("read_only") else "ok"
