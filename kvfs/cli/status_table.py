"""The tables of ``kvfs status`` for a reader: what it is, how full, what it holds, what went wrong.

Sizes are rounded; ``--json`` has every figure to the byte. What a newer server tells besides comes
last, under its own name, so that nothing is hidden.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.table import Table

from kvfs.core.printable import printable
from kvfs.core.sizes import format_size

#: Headings, and under each the figures with their names for a reader.
_SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Mount": {
        "source": "source",
        "data_path": "data path",
        "data_path_reason": "why",
        "read_only": "read only",
        "server_pid": "server's pid",
        "version": "version",
        "uuid": "UUID",
        "name": "name",
    },
    "Space": {
        "capacity_bytes": "capacity",
        "bound_bytes": "of it for blocks",
        "used_bytes": "used",
        "free_bytes": "free",
        "evictable_bytes": "may be evicted",
        "leased_bytes": "leased to processes",
        "lessee": "most by process",
        "lease_max_bytes": "at most (lease_max)",
        "slab_bytes": "slabs",
        "pinned_bytes": "pinned",
        "open_bytes": "open",
        "ready_bytes": "prepared for drafts",
        "headroom_bytes": "kept free ahead",
        "leaving_bytes": "being removed",
        "lingering_bytes": "removed, still used",
        "overcommitted_bytes": "promised beyond",
        "holder": "most that stays",
    },
    "Blocks": {
        "blocks": "blocks",
        "directories": "directories",
        "symlinks": "symlinks",
        "index_rows_bytes": "index",
        "index_map_bytes": "index holds at most",
        "states": "states",
        "open_inodes": "open",
        "open_handles": "handles",
        "graves": "just removed",
        "ready_extents": "extents prepared",
        "ready_hits": "found prepared",
        "ready_misses": "not prepared",
    },
    "Work": {
        "eviction": "evicted",
        "requests": "requests",
        "answered_in_channel": "of them in the channel",
        "refused": "refused",
        "stalls": "waits for room",
        "notifications": "notifications",
        "background_backlog": "waiting jobs",
        "backing_ids_open": "backing ids, open",
        "backing_ids_idle": "backing ids, kept",
    },
    "Trouble": {
        "warning": "warning",
        "lost": "lost",
        "torn": "torn blocks dropped",
        "unproven": "unproven blocks dropped",
        "dismissed": "lost blocks dropped",
        "write_back_failures": "failed write-backs",
        "damaged_rows": "damaged rows",
        "background_failures": "failed jobs",
    },
}

#: Numbers that are no counts.
_PIDS: Final = ("pid", "server_pid")

#: Of all sections, so that their second columns stand below each other.
_LABEL_WIDTH: Final = max(len(label) for names in _SECTIONS.values() for label in names.values())


def tables(status: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of one mount's *status*, each under its heading."""
    told = dict(status)
    mountpoint = str(told.pop("mountpoint", ""))
    for heading, labels in _SECTIONS.items():
        figures = {name: told.pop(name) for name in labels if name in told}
        if heading == "Trouble":
            figures = {name: value for name, value in figures.items() if value}
        rows = [(labels[name], _shown(name, value)) for name, value in figures.items()]
        if heading == "Trouble" and not rows:
            rows = [("none", "")]
        if rows:
            yield _table(mountpoint if heading == "Mount" else heading, rows)
    if told:
        more = [(printable(name), _shown(name, value)) for name, value in told.items()]
        yield _table("More", more)


def _table(heading: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(
        title=printable(heading),
        show_header=False,
        box=None,
        title_justify="left",
        title_style="bold",
    )
    table.add_column(min_width=_LABEL_WIDTH)
    for row in rows:
        table.add_row(*row)
    return table


def _shown(name: str, value: object) -> str:
    """Return a value of the status for a reader."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return _listed(value)
    if isinstance(value, list):
        return "\n".join(_shown(name, item) for item in value) or "-"
    if name.endswith("bytes") and isinstance(value, int):
        return format_size(value)
    if isinstance(value, int) and name not in _PIDS:
        return f"{value:,}"
    return printable(str(value))


def _listed(value: Mapping[str, Any]) -> str:
    """Return counts, the most frequent first, which a reader looks for; states a line each."""
    if value and all(isinstance(each, Mapping) for each in value.values()):
        return "\n".join(f"{printable(key)}: {_listed(each)}" for key, each in value.items())
    counts = all(isinstance(count, int) for count in value.values())
    frequent = counts and not any(key.endswith("bytes") for key in value)
    rows = sorted(value.items(), key=lambda row: -row[1]) if frequent else list(value.items())
    parts = [
        _shown(key, each)
        if key == "bytes"
        else f"{printable(key).replace('_', ' ')} {_shown(key, each)}"
        for key, each in rows
    ]
    return ", ".join(parts) or "-"
