"""``kvfs status``: the state of the running servers; without MOUNT, a line for each."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.failures import one_line
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import Column, columns_for_tables, table_lines
from kvfs.client.servers import answers_and_dead, complaint, not_here, status_of
from kvfs.core.errors import NotMounted
from kvfs.core.shown_names import printable
from kvfs.core.sizes import format_size, shown_rate
from kvfs.machine.mount_table import kvfs_at

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

#: Narrower terminals have no room for a figure with its name.
_COLUMNS_MIN: Final = 20
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


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "status",
        run,
        description="Show the mount at MOUNT in full, or all mounts in a line each; with --all "
        "those in full, too. With --json one\nJSON object for MOUNT, a list of them without. Needs "
        "root, or the group of the setting control_group.\nEnds with exit code 11 when nothing is "
        "mounted.",
        example="kvfs status\n  kvfs status /kv --json",
    )
    parser.add_argument("mountpoint", metavar="MOUNT", nargs="?")
    parser.add_argument("--all", action="store_true", help="show every mount in full")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask, and print the answers."""
    if args.mountpoint:
        status = status_of(args.mountpoint)
        if args.json:
            print(json.dumps(status, indent=2))
        else:
            _print_in_full([status])
        return 0
    found = answers_and_dead()
    served = [answer.status for answer in found if answer.error is None]
    if args.json:
        print(json.dumps(served, indent=2))
    elif args.all:
        _print_in_full(served)
    elif served:
        for line in list_of(served, columns_for_tables(_COLUMNS_MIN)):
            print(line)
    for status in served:  # its server lives, but its mount is not visible here
        mountpoint = str(status["mountpoint"])
        if kvfs_at(mountpoint) is None and (note := not_here(mountpoint)):
            print(f"kvfs: {note}", file=sys.stderr)
    failed = [answer for answer in found if answer.error is not None]
    for answer in failed:
        print(f"kvfs: {one_line(complaint(answer))}", file=sys.stderr)
    if not served:
        # The lines above, if any, say more than "nothing is mounted".
        if failed and failed[0].error is not None:
            return failed[0].error.exit_code
        raise NotMounted("no kvfs is mounted")
    return 0


def _print_in_full(statuses: list[dict[str, Any]]) -> None:
    from kvfs.cli.status_table import tables

    width = columns_for_tables(_COLUMNS_MIN)
    for status in statuses:
        for lines in tables(status, width):
            print(*lines, sep="\n", end="\n\n")


def list_of(statuses: Iterable[Mapping[str, Any]], columns: int) -> Iterator[str]:
    """Yield the lines of the mounts with *statuses*; a long mountpoint takes several.

    No figure is cut off: if *columns* are too few, they stand one below another.
    """
    yield from table_lines(_COLUMNS, map(_row, statuses), columns, stacks=True)


def _row(status: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = (status.get(f"{name}_bytes") for name in ("used", "capacity", "evictable"))
    blocks = status.get("blocks")
    return (
        printable(str(status.get("mountpoint", "?"))),
        *("-" if size is None else format_size(size) for size in sizes),
        "-" if blocks is None else f"{blocks:,}",
        _hit_rate(status.get("cache")),
        printable(str(status.get("data_path", "?"))),
        health_of(status),
    )


def _hit_rate(cache: object) -> str:
    return shown_rate(cache.get("hit_rate") if isinstance(cache, Mapping) else None)


def health_of(status: Mapping[str, Any]) -> str:
    """Return the health of the mount in a word or two; ``kvfs status MOUNT`` has the details."""
    if status.get("device_lost"):
        return "device lost"
    if status.get("device_silent_s"):
        return "device silent"
    if any(status.get(name) for name in _WRONG):
        return "see kvfs doctor"
    if status.get("warning"):
        return "little evictable"
    return "read only" if status.get("read_only") else "ok"
