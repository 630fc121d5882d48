"""The tables of ``kvfs status`` for a reader: the mount, its space, blocks, work and trouble.

Sizes are rounded; ``--json`` has exact figures. Figures of a newer server that are not known here
come last, under their own names.
"""

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any, Final

from kvfs.cli.tables import Column, headed, shown_time, table_lines
from kvfs.core.shown_names import printable
from kvfs.core.sizes import format_size, shown_rate

#: Headings; under each the keys of its figures, with their names for a reader.
_SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Mount": {
        "source": "source",
        "encryption": "encrypted",
        "device_state": "device",
        "data_path": "data path",
        "data_path_reason": "reason",
        "request_reader": "requests read by",
        "request_reader_reason": "reason",
        "read_only": "read only",
        "idmapped_mounts": "id-mapped mounts",
        "server_pid": "server pid",
        "supervisor_pid": "supervisor pid",
        "restarts": "restarts of the server",
        "upgrades": "upgrades of it",
        "longest_pause_s": "longest pause, s",
        "takeover": "take-over",
        "request_wait_max_s": "longest wait of a request, s",
        "server_cpu_s": "CPU time of the server, s",
        "server_memory_bytes": "its memory",
        "device_number": "device number",
        "device_number_before": "device number before",
        "version": "version",
        "uuid": "UUID",
        "root": "root directory",
        "name": "name",
    },
    "Space": {
        "capacity_bytes": "capacity",
        "drives": "drives",
        "missing_drives": "missing or failed drives",
        "usable_bytes": "usable for blocks",
        "used_bytes": "used",
        "free_bytes": "free",
        "evictable_bytes": "evictable",
        "leased_bytes": "leased to processes",
        "largest_lease_holder": "largest lease holder",
        "lease_max_bytes": "lease limit (lease_max)",
        "slab_bytes": "slabs",
        "pinned_bytes": "pinned",
        "hints": "hints",
        "probation": "new blocks in memory",
        "prefetch": "read ahead of loads",
        "together": "units (evict=together)",
        "held_by": "held by models",
        "tenants": "tenants, by uid or directory",
        "held_refused": "refused: a tenant held its share",
        "open_bytes": "open",
        "old_version_bytes": "old versions that are read",
        "open_by": "open by",
        "preallocated_bytes": "preallocated",
        "headroom_bytes": "headroom",
        "pending_delete_bytes": "pending delete",
        "deleted_open_bytes": "deleted, still open",
        "overcommitted_bytes": "over capacity",
        "largest_unevictable": "largest non-evictable directory",
    },
    "Blocks": {
        "blocks": "blocks",
        "directories": "directories",
        "symlinks": "symlinks",
        "index_used_bytes": "index size",
        "index_in": "index in",
        "index_memory": "index, memory",
        "index_map_bytes": "index size limit",
        "states": "states",
        "open_inodes": "open inodes",
        "open_handles": "open handles",
        "recently_deleted": "recently deleted",
        "preallocated_extents": "preallocated extents",
        "preallocated_hits": "preallocation hits",
        "preallocated_misses": "preallocation misses",
    },
    "Work": {
        "eviction": "eviction",
        "gate": "gate",
        "store_times": "time of a store",
        "requests": "requests",
        "requests_fast_path": "on the fast path",
        "request_times": "time of a request",
        "server_read_bytes": "read by the server",
        "errors": "errors returned",
        "space_waits": "waits for space",
        "invalidations": "kernel invalidations",
        "durability": "not durable yet",
        "checksums": "checksums",
        "background_backlog": "background jobs queued",
        "index_log": "log of the index",
        "reconcile": "index compared with the files",
        "strays": "files without a name",
        "backing_ids_open": "backing ids, open",
        "backing_ids_cached": "backing ids, cached",
    },
    "Trouble": {
        "warning": "warning",
        "device_lost": "device lost",
        "device_silent_s": "device silent for, s",
        "torn_blocks": "torn blocks",
        "unverified_blocks": "unverified blocks",
        "lost_blocks": "lost blocks",
        "write_back_failures": "failed write-backs",
        "damaged_rows": "damaged index rows",
        "background_failures": "failed background jobs",
        "follow_failures": "changes not followed",
    },
}

#: What is told of each drive.
_OF_A_DRIVE: Final = ("source", "state", "uuid", "capacity_bytes", "used_bytes", "blocks")
#: Numbers that are not counts.
_IDS: Final = (
    *("pid", "server_pid", "supervisor_pid", "uid", "gid"),
    *("device_number", "device_number_before"),
)

#: The same for all sections, so that their second columns are aligned.
_LABEL_WIDTH: Final = max(len(label) for names in _SECTIONS.values() for label in names.values())
#: Length of the bar for a hit rate of 100 %, and what stands before it.
_BAR_COLUMNS: Final = 40
_BEFORE_BAR_COLUMNS: Final = 32


def tables(status: Mapping[str, Any], width: int) -> Iterator[Iterator[str]]:
    """Yield the tables of one mount's *status*, each as its lines; the first is its heading.

    Values are broken at *width* characters.
    """
    told = dict(status)
    mountpoint = str(told.pop("mountpoint", ""))
    cache = told.pop("cache", None)
    if drives := told.pop("drives", {}):
        told |= _drives_shown(drives)
    for heading, labels in _SECTIONS.items():
        if heading == "Work" and cache:
            yield _lines("Cache", cache_rows(cache), width)
            if cache.get("curve"):
                yield curve_lines(cache, width)
            if cache.get("tier_behind", {}).get("daily_bytes"):
                yield behind_lines(cache["tier_behind"], width)
            yield from tally_tables(cache, width)
        figures = {name: told.pop(name) for name in labels if name in told}
        if heading == "Trouble":
            figures = {name: value for name, value in figures.items() if value}
        rows = [(labels[name], _shown(name, value)) for name, value in figures.items()]
        if heading == "Trouble" and not rows:
            rows = [("none", "")]
        if rows:
            yield _lines(mountpoint if heading == "Mount" else heading, rows, width)
    if told:
        more = [(printable(name), _shown(name, value)) for name, value in told.items()]
        yield _lines("More", more, width)


def _drives_shown(drives: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is told of each of several drives; `kvfs drive list` has the rest."""
    if len(drives) == 1:  # the lines of the mount say the same
        return {}
    shown = [
        (number, {key: one[key] for key in _OF_A_DRIVE if key in one})
        for number, one in drives.items()
    ]
    return {"drives": dict(shown)}


def _lines(heading: str, rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    yield headed(printable(heading))
    columns = (Column(least=_LABEL_WIDTH), Column(folds=True))
    yield from table_lines(columns, rows, width, stacks=True)


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
    if isinstance(value, int) and name not in _IDS:
        return f"{value:,}"
    return printable(str(value))


def _listed(value: Mapping[str, Any]) -> str:
    """Return counts, the most frequent first; states on a line each."""
    if "p99_s" in value:
        return f"p50 {shown_time(value['p50_s'])}, p99 {shown_time(value['p99_s'])}"
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
    yield from map(headed, wrap("Hit rate at other sizes of the pool (estimated)", width))
    bar_columns = max(1, min(_BAR_COLUMNS, width - _BEFORE_BAR_COLUMNS))
    rows = [
        (
            f"{point['factor']:g} x",
            format_size(point["capacity_bytes"]),
            shown_rate(point["hit_rate"]),
            "#" * round(point["hit_rate"] * bar_columns) or ".",
        )
        for point in cache["curve"]
    ]
    yield from table_lines((*[Column(right=True)] * 3, Column()), rows, width)


def behind_lines(behind: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield what a tier behind this one would add: a line for each time that it keeps blocks."""
    heading = "A tier behind this one, by how long it keeps what is evicted here (estimated)"
    yield from map(headed, wrap(heading, width))
    figures = ("hits gained", "stored again", "read", "it holds")
    columns = (Column("kept for"), *(Column(name, right=True) for name in figures))
    rows = (
        (
            name,
            shown_rate(age["hit_rate_gain"]),
            f"{age['stored_again']:,}",
            format_size(age["read_bytes"]),
            format_size(age["held_bytes"]),
        )
        for name, age in behind["ages"].items()
    )
    yield from table_lines(columns, rows, width, stacks=True)
    yield from wrap(f"It would be written {format_size(behind['daily_bytes'])} a day.", width)


def tally_tables(cache: Mapping[str, Any], width: int) -> Iterator[Iterator[str]]:
    """Yield a table with a line for each directory, and one for each model if any is known."""
    for heading, tallies in (("directory", cache["directories"]), ("model", cache["models"])):
        if tallies:
            yield _tally_lines(heading, tallies, width)


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
    first, *others = table_lines(columns, rows, width, stacks=True)
    yield headed(first)
    yield from others
