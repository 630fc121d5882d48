"""``kvfs drive``: what the drives of a mount hold, and which of them are in use."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import locate
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import LEAST_COLUMNS, Column, columns_for_tables, shown_time, table_lines
from kvfs.client.control_socket import ask
from kvfs.client.servers import status_of
from kvfs.core.shown_names import printable
from kvfs.core.sizes import count_of, format_size, shown_rate

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

_COLUMNS: Final = (
    Column("drive", right=True),
    Column("state"),
    *(Column(name, right=True) for name in ("capacity", "held", "blocks", "opens", "stores")),
    *(Column(name, right=True) for name in ("errors", "slowest", "life left")),
    Column("source and UUID", folds=True),
)
_UNKNOWN: Final = "-"


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser, and those of its own verbs."""
    parser = add_verb(
        subparsers,
        "drive",
        lambda _: 0,
        description="Show and change the drives of the pool that is mounted at MOUNT.",
        example="kvfs drive list /kv\n  kvfs drive drain /kv 1",
    )
    nested = parser.add_subparsers(metavar="WHAT", required=True)
    _configure_list(nested)
    _configure_drain(nested)


def _configure_list(nested: "Subparsers") -> None:
    parser = add_verb(
        nested,
        "list",
        run_list,
        summary="show what each drive holds, and how it answers",
        description="Show each drive of the pool at MOUNT: its number, how it answers, its part of "
        "the capacity, what blocks hold there;\nand since the server started: opens of its blocks, "
        "blocks stored, failures found, and the slowest answer to the small\nread that the server "
        "sends it every two seconds.",
        example="kvfs drive list /kv",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _configure_drain(nested: "Subparsers") -> None:
    parser = add_verb(
        nested,
        "drain",
        run_drain,
        summary="put nothing new on a drive, and evict what it holds",
        description="Put no new blocks on the drive with the number DRIVE (see `kvfs drive list`), "
        "and evict what it holds, a few hundred\nblocks a second, as a full pool would. Nothing is "
        "copied. What is pinned, leased or open stays until it need not.\n"
        "Returns at once; `kvfs drive list` shows how much is left. It holds until --undo, also "
        "after a remount.\nEnds with exit code 27 if no other drive takes blocks.",
        example="kvfs drive drain /kv 1\n  kvfs drive drain /kv 1 --undo",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument("drive", metavar="DRIVE", type=int)
    parser.add_argument("--undo", action="store_true", help="let it take blocks again")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_drain(args: argparse.Namespace) -> int:
    """Begin or end it, and print how much is left."""
    where = locate([args.mountpoint])
    told = ask(where.socket, "drive-drain", {"drive": args.drive, "undo": args.undo})
    if args.json:
        print(json.dumps({"mountpoint": where.mountpoint, **told}, indent=2))
        return 0
    held = f"{count_of(told['blocks'], 'block')}, {format_size(told['used_bytes'])}"
    if args.undo:
        print(f"drive {args.drive} takes blocks; it holds {held}")
    else:
        print(f"drive {args.drive} takes no more blocks; left: {held}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Print the drives."""
    status = status_of(args.mountpoint)
    drives = status.get("drives", {})
    if args.json:
        print(json.dumps({"mountpoint": status["mountpoint"], "drives": drives}, indent=2))
        return 0
    for line in drive_lines(drives, columns_for_tables(LEAST_COLUMNS)):
        print(line)
    return 0


def drive_lines(drives: Mapping[str, Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield a table of *drives*, as in `kvfs status`, headings first."""
    return table_lines(_COLUMNS, list(_rows(drives)), width, stacks=True)


def _rows(drives: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield the cells of each drive; a server of another version may lack some figures."""
    for number, one in drives.items():
        counts = (one.get(name) for name in ("blocks", "opens", "stores", "errors"))
        blocks, opens, stores, errors = (
            _UNKNOWN if count is None else f"{count:,}" for count in counts
        )
        slowest_s, left = one.get("slowest_probe_s"), one.get("endurance_left")
        yield (
            number,
            one["state"],
            *(format_size(one["capacity_bytes"]), format_size(one["used_bytes"])),
            *(blocks, opens, stores, errors),
            _UNKNOWN if slowest_s is None else shown_time(slowest_s),
            _UNKNOWN if left is None else shown_rate(left),
            f"{printable(one['source'])}\n{one['uuid']}",
        )
