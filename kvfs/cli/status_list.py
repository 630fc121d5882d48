"""The table of ``kvfs status`` without a MOUNT: one line a mount, what is asked first.

Without rich, whose import takes longer than all the rest of the command.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

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


_HEADINGS: Final = (
    *("MOUNT", "USED", "OF", "EVICTABLE", "BLOCKS", "HIT RATE", "DATA PATH", "HEALTH"),
)
_FIGURES: Final = range(1, 6)  # right-aligned
_GAP: Final = "  "


def list_of(statuses: Iterable[Mapping[str, Any]], columns: int) -> Iterator[str]:
    """Yield the lines of the mounts with *statuses*; a long mountpoint takes several.

    No figure is cut off, so a line may be longer than *columns*.
    """
    rows = [_HEADINGS, *(_row(status) for status in statuses)]
    widths = [max(len(row[number]) for row in rows) for number in range(len(_HEADINGS))]
    others = sum(widths[1:]) + len(_GAP) * len(widths[1:])
    widths[0] = min(widths[0], max(columns - others, len(_HEADINGS[0])))
    for name, *rest in rows:
        cells = [name[: widths[0]].ljust(widths[0])]
        for number, cell in enumerate(rest, 1):
            aligned = cell.rjust if number in _FIGURES else cell.ljust
            cells.append(aligned(widths[number]))
        yield _GAP.join(cells).rstrip()
        for at in range(widths[0], len(name), widths[0]):
            yield name[at : at + widths[0]]


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
