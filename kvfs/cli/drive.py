"""``kvfs drive``: what the drives of a mount hold, and which of them are in use."""

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import absolute_sources, locate
from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import LEAST_COLUMNS, Column, columns_for_tables, shown_time, table_lines
from kvfs.cli.upgrade import replaced
from kvfs.client.control_socket import ask
from kvfs.client.servers import status_of
from kvfs.core.encryption import parse_encryption
from kvfs.core.errors import CommandError, ServeFailed, SourceBusy
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
    _configure_add(nested)
    _configure_remove(nested)


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


def _configure_add(nested: "Subparsers") -> None:
    parser = add_verb(
        nested,
        "add",
        run_add,
        summary="make one more drive, and use it at once",
        description="Make SOURCE one more drive of the pool at MOUNT, which is in use meanwhile. "
        "It is blank, and as the others are: a block\ndevice or an image file, or a directory. If "
        "they are encrypted it is, too, with their key. New blocks go there too;\nnothing is "
        "moved. A server of this command's version takes over, as with `kvfs upgrade`: callers "
        "wait for a\nmoment. Where fstab and units list the drives, name it too.",
        example="kvfs drive add /kv /dev/nvme2n1",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite what SOURCE holds (never a directory's other files)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_add(args: argparse.Namespace) -> int:
    """Make the drive, have it added, and wait until it is served."""
    need_root("kvfs drive add")
    where = locate([args.mountpoint])
    (source,) = absolute_sources([args.source])
    from kvfs.devices import PoolHeader, format_one_more, unmake_drive
    from kvfs.devices.pool_files import Membership
    from kvfs.engine.recovery.rebuild import found_pool

    before = ask(where.socket, "status")
    plan = ask(where.socket, "drive-plan")
    fields = plan["header"]
    several = fields["several"]
    of_pool = several | {name: tuple(several[name]) for name in ("drives", "removed")}
    header = PoolHeader(**(fields | {"several": Membership(**of_pool)}))
    format_one_more(
        source,
        plan["sources"],
        header,
        fill=found_pool,
        force=args.force,
        encryption=parse_encryption(plan.get("encryption", "")),  # an older server has none
    )
    try:
        after = replaced(where, before, "drive-add", {"source": source})
        drives = after["drives"]
        if header.uuid not in [one["uuid"] for one in drives.values()]:
            raise ServeFailed(f"{source} was not added: the server died meanwhile; try again")
    except CommandError:
        with contextlib.suppress(CommandError):
            ask(where.socket, "status")  # without a server it may have been added
            unmake_drive(source)  # refused if it was: it is in use
        raise
    if args.json:
        told = {"drive": header.drive, "uuid": header.uuid}
        print(json.dumps({"mountpoint": where.mountpoint, **told}, indent=2))
        return 0
    capacity = format_size(drives[f"{header.drive}"]["capacity_bytes"])
    print(f"drive {header.drive} takes blocks: {printable(source)}, {capacity}")
    if after["capacity_bytes"] <= before["capacity_bytes"]:
        whole = format_size(after["capacity_bytes"])
        print(f"the pool has {whole} as before: the mount's --capacity says so, for all drives")
    return 0


def _configure_remove(nested: "Subparsers") -> None:
    parser = add_verb(
        nested,
        "remove",
        run_remove,
        summary="take a drive out of the pool",
        description="Take the drive with the number DRIVE out of the pool at MOUNT, which is in "
        "use meanwhile: when it is empty\n(`kvfs drive drain`), or with --now, which gives up what "
        "it holds. A server of this command's version takes over,\nas with `kvfs upgrade`: callers "
        "wait for a moment. Its number is not used again, and it must be named nowhere\n(fstab, "
        "units). Exit code 27: it is not empty, no other takes blocks, or it is drive 0 and works.",
        example="kvfs drive remove /kv 1\n  kvfs drive remove /kv 2 --now",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument("drive", metavar="DRIVE", type=int)
    parser.add_argument(
        "--now", action="store_true", help="with what it holds: those blocks are misses then"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_remove(args: argparse.Namespace) -> int:
    """Have it removed, and wait until the pool is served without it, and nobody uses it."""
    need_root("kvfs drive remove")
    where = locate([args.mountpoint])
    before, number = ask(where.socket, "status"), f"{args.drive}"
    after = replaced(where, before, "drive-remove", {"drive": args.drive, "now": args.now})
    if number in after["drives"]:
        raise ServeFailed(f"drive {number} was not removed: the server died meanwhile; try again")
    one = before["drives"].get(number, {"source": "", "uuid": ""})
    in_use = _is_in_use(one["source"])
    if args.json:
        told = {"drive": args.drive, **{name: one[name] for name in ("source", "uuid")}}
        told |= {"in_use": in_use}
        print(json.dumps({"mountpoint": where.mountpoint, **told}, indent=2))
        return 0
    source = printable(one["source"])
    print(f"drive {number} is removed: {source}. Name it nowhere any more (fstab, units)")
    if in_use:
        print(f"{source} is in use until the last block there that is open is closed")
    return 0


def _is_in_use(source: str) -> bool:
    """Whether somebody still uses *source* some seconds after it was removed."""
    from kvfs.devices.released import wait_released

    try:
        wait_released(source)
    except SourceBusy:
        return True
    except CommandError:  # it is gone, or has failed
        return False
    return False


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
