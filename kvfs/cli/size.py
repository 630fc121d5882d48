"""``kvfs size``: what capacity, memory, cores and drive a load needs, before anything is bought."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import size_of
from kvfs.cli.parser import add_verb
from kvfs.cli.replay import POLICIES
from kvfs.cli.tables import (
    LEAST_COLUMNS,
    Column,
    columns_for_tables,
    headed,
    shown_time,
    table_lines,
)
from kvfs.core.errors import UsageError
from kvfs.core.shown_names import printable
from kvfs.core.sizes import format_size, parse_age, shown_rate

if TYPE_CHECKING:
    from kvfs.bench.simulate.found import TraceLoad
    from kvfs.cli.parser import Subparsers
    from kvfs.core.load_needs import Load, Needs

#: A million stores a second is 461 cores: a mistake in the unit.
_RATE_MAX: Final = 1e6
_FIND_PERCENT: Final = 90.0
_HOUR_S: Final = 3600.0
_COLUMNS: Final = (Column(), Column(right=True), Column(folds=True))
#: The same for all sections, so that their columns are aligned.
_LABELS: Final = 24
_FIGURES: Final = 11


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "size",
        run,
        description="Tell what a load needs: capacity and headroom, memory, cores, and for how "
        "long a drive lasts.\nOr, with --capacity, how long blocks stay. Or, from a trace of "
        "requests, what a pool of each size would find.\nThe figures are measured "
        "(docs/sizing.md). Sizes are binary (K = 1024). Needs neither a mount nor root.",
        example="kvfs size --block 4M --stores 200 --keep 24h --endurance 7P\n"
        "  kvfs size --block 32M --rate 1G --capacity 3T --json\n"
        "  kvfs size --block 32M --trace trace.jsonl",
    )
    add = parser.add_argument
    add("--block", metavar="SIZE", required=True, help="bytes of a block, e.g. 4M")
    add("--stores", metavar="N", help="blocks stored a second")
    add("--rate", metavar="SIZE", help="or bytes stored a second, e.g. 1G")
    add("--loads", metavar="N", default="0", help="blocks loaded a second (default 0)")
    add("--keep", metavar="AGE", help="for how long a block is to stay, e.g. 24h or 7d")
    add("--capacity", metavar="SIZE", help="or what the pool has; then the time follows")
    add("--trace", metavar="FILE", help="a trace of requests, in place of rates (see kvfs replay)")
    add(
        "--find",
        metavar="PERCENT",
        help="with --trace: as large as finds this part of what any cache can find "
        f"(default {_FIND_PERCENT:g})",
    )
    add("--endurance", metavar="SIZE", help="what may be written to the drives, e.g. 7P")
    add("--eviction", choices=POLICIES, default="lru", help="(default %(default)s)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compute, and print it."""
    from kvfs.core.load_needs import needs_of, warnings_of

    block_bytes = size_of(args.block, "--block") or 0
    traced = _traced(args, block_bytes) if args.trace else None
    load = _stated(args, block_bytes) if traced is None else _of_trace(args, block_bytes, traced)
    if load.capacity_bytes is not None and load.capacity_bytes < 2 * block_bytes:
        raise UsageError("--capacity must be at least two blocks")
    needs = needs_of(load)
    warnings = list(warnings_of(load, needs))
    device_bytes = _device_bytes(needs)
    if args.json:
        print(json.dumps(_as_json(load, needs, traced, device_bytes, warnings), indent=2))
        return 0
    width = columns_for_tables(LEAST_COLUMNS, 100)
    if traced is not None:
        print(*_trace_lines(args.trace, traced, block_bytes), "", sep="\n")
    print(*_lines(load, needs, device_bytes, width), sep="\n")
    sys.stdout.flush()
    for line in warnings:
        print(f"kvfs: {line}", file=sys.stderr)
    return 0


def _stated(args: argparse.Namespace, block_bytes: int) -> "Load":
    """Return the load that the flags state. Raises UsageError."""
    from kvfs.core.load_needs import Load

    if (args.stores is None) == (args.rate is None):
        raise UsageError("give --stores or --rate, or --trace in place of both")
    if (args.keep is None) == (args.capacity is None):
        raise UsageError("give --keep or --capacity, of which each follows from the other")
    if args.find is not None:
        raise UsageError("--find needs --trace")
    if args.stores is not None:
        stores_s = _number(args.stores, "--stores", low=0, high=_RATE_MAX)
    else:
        stores_s = (size_of(args.rate, "--rate") or 0) / block_bytes
    if not 0 < stores_s <= _RATE_MAX:
        raise UsageError(
            f"that is {stores_s:g} stores a second: between 0 and {_RATE_MAX:g}, please"
        )
    return Load(
        block_bytes=block_bytes,
        stores_s=stores_s,
        loads_s=_number(args.loads, "--loads", low=0, high=_RATE_MAX),
        keep_s=None if args.keep is None else _age(args.keep),
        **_shared(args),
    )


def _shared(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "capacity_bytes": size_of(args.capacity, "--capacity"),
        "endurance_bytes": size_of(args.endurance, "--endurance"),
        "is_adaptive": args.eviction != "lru",
    }


def _number(text: str, flag: str, *, low: float, high: float) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not low <= found <= high:
        raise UsageError(f"{flag}: {text!r} is not a number between {low:g} and {high:g}")
    return found


def _age(text: str) -> float:
    try:
        found = parse_age(text)
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from None
    if found <= 0:
        raise UsageError("--keep must be greater than 0")
    return found


def _traced(args: argparse.Namespace, block_bytes: int) -> "TraceLoad":
    """Return what the trace asks for. Raises UsageError, TraceUnreadable."""
    from kvfs.bench.replay.trace import read_trace
    from kvfs.bench.simulate.found import load_of

    if args.stores is not None or args.rate is not None or args.keep is not None:
        raise UsageError("--trace has the rates: leave out --stores, --rate and --keep")
    if args.capacity is not None and args.find is not None:
        raise UsageError("give --capacity or --find, not both")
    capacity_bytes = size_of(args.capacity, "--capacity")
    sizes = [] if capacity_bytes is None else [max(1, capacity_bytes // block_bytes)]
    return load_of(read_trace(args.trace), sizes)


def _of_trace(args: argparse.Namespace, block_bytes: int, traced: "TraceLoad") -> "Load":
    """Return the load of a pool that finds as much of the trace as is asked for."""
    from kvfs.core.load_needs import Load

    if args.capacity is None:
        percent = _FIND_PERCENT
        if args.find is not None:
            percent = _number(args.find.removesuffix("%"), "--find", low=1, high=100)
        blocks = traced.least_for(percent / 100)
    else:
        blocks = min((size_of(args.capacity, "--capacity") or 0) // block_bytes, traced.blocks)
    found = traced.found_with(blocks)
    asked_s = traced.accesses / traced.span_s
    stores_s = asked_s * (1 - found)
    shared = _shared(args)
    keep_s = None if shared["capacity_bytes"] is not None else blocks / stores_s
    return Load(block_bytes, stores_s, loads_s=asked_s * found, keep_s=keep_s, **shared)


def _device_bytes(needs: "Needs") -> int:
    """Return the size of a drive or image with that capacity; small blocks have many names."""
    from kvfs.core.pool_layout import XFS_INODE_BYTES
    from kvfs.devices.device import image_size_bytes, metadata_bytes

    names_bytes = needs.log_bytes + needs.blocks * XFS_INODE_BYTES
    more_bytes = max(0, names_bytes - metadata_bytes(needs.capacity_bytes))
    return image_size_bytes(needs.capacity_bytes) + more_bytes


def _trace_lines(name: str, traced: "TraceLoad", block_bytes: int) -> Iterator[str]:
    """Yield what pools of several sizes find of the trace."""
    yield headed(printable(name))
    yield (
        f"{traced.requests:,} requests in {traced.span_s / _HOUR_S:.1f} h, {traced.blocks:,} "
        f"blocks; any cache finds at most {shown_rate(traced.best)}"
    )
    columns = [Column(text, right=True) for text in ("blocks", "take", "found", "of the most")]
    rows = [
        (
            f"{blocks:,}",
            format_size(blocks * block_bytes),
            shown_rate(found),
            shown_rate(found / traced.best if traced.best else None),
        )
        for blocks, found in traced.found.items()
    ]
    yield from table_lines(columns, rows, LEAST_COLUMNS)


def _lines(load: "Load", needs: "Needs", device_bytes: int, width: int) -> Iterator[str]:
    """Yield the tables for a reader."""
    yield headed(
        f"{load.stores_s:,.6g} stores a second of {format_size(load.block_bytes)}: "
        f"{format_size(int(load.stored_bytes_s))} a second"
    )
    for heading, rows in _sections(load, needs, device_bytes):
        yield ""
        yield headed(heading)
        placed = [
            (f"  {what}".ljust(_LABELS), much.rjust(_FIGURES), why) for what, much, why in rows
        ]
        yield from table_lines(_COLUMNS, placed, width)


def _sections(
    load: "Load", needs: "Needs", device_bytes: int
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each heading with its rows: what, how much, why."""
    yield (
        "Pool",
        [
            ("blocks stay for", shown_time(needs.keep_s), "if nobody uses them meanwhile"),
            ("blocks", f"{needs.blocks:,}", f"{format_size(needs.blocks_bytes)} of them"),
            ("headroom", format_size(needs.headroom_bytes), "kept free ahead of writers"),
            ("ready files", format_size(needs.ready_bytes), "prepared for the next stores"),
            ("capacity", format_size(needs.capacity_bytes), "for --capacity"),
            ("drive or image", format_size(device_bytes), "capacity and what XFS needs"),
            ("copies of the index", format_size(needs.log_bytes), "of that, at most"),
        ],
    )
    of_blocks = "names, heat and order of the blocks"
    yield (
        "Memory",
        [
            ("index", format_size(needs.index_memory_bytes), "at most half of the machine's"),
            ("server, supervisor", format_size(needs.processes_bytes), "without blocks"),
            ("server, for blocks", format_size(needs.blocks_memory_bytes), of_blocks),
            ("kernel", format_size(needs.kernel_memory_bytes), "blocks that were opened lately"),
            ("all", format_size(needs.memory_bytes), "page cache not counted"),
        ],
    )
    loads = (
        "nothing is loaded: give --loads" if not load.loads_s else f"{load.loads_s:,.4g} a second"
    )
    yield (
        "CPU of the server, in cores (one is the most)",
        [
            ("stores", f"{needs.store_cores:.3f}", f"{load.stores_s:,.4g} a second"),
            ("loads", f"{needs.load_cores:.3f}", loads),
            ("all", f"{needs.cores:.3f}", ""),
        ],
    )
    promised = load.endurance_bytes
    life = ("lasts", "-", "give --endurance, the bytes that its maker promises")
    if needs.life_days is not None and promised is not None:
        life = ("lasts", f"{needs.life_days:,.0f} days", f"of {format_size(promised)} promised")
    written = format_size(int(needs.written_bytes_day))
    yield "Drive", [("written a day", written, "stores, names and rows"), life]


def _as_json(
    load: "Load",
    needs: "Needs",
    traced: "TraceLoad | None",
    device_bytes: int,
    warnings: list[str],
) -> dict[str, Any]:
    """Return the same as numbers; cores and bytes are those of one server."""
    told: dict[str, Any] = {
        "load": load._asdict(),
        "needs": {
            **needs._asdict(),
            "memory_bytes": needs.memory_bytes,
            "cores": needs.cores,
            "device_bytes": device_bytes,
        },
        "warnings": warnings,
    }
    if traced is not None:
        sizes = [{"blocks": blocks, "hit_rate": rate} for blocks, rate in traced.found.items()]
        told["trace"] = {**traced._asdict(), "found": sizes}
    return told
