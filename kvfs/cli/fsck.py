"""``kvfs fsck``, ``kvfs verify``: check what is stored.

The first checks a pool that is not mounted, and rebuilds its index from the extents; the second
compares blocks of a mount with the checksums of what was stored.
"""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from kvfs.cli.arguments import (
    add_encrypt,
    add_match,
    add_sources,
    encryption_of,
    locate,
    source_of,
    wanted_pool,
)
from kvfs.cli.failures import need_root
from kvfs.cli.follow import follow, progress_bar
from kvfs.cli.parser import add_verb
from kvfs.core.errors import (
    NO_SPACE,
    CheckFailed,
    DriveMissing,
    NoSpace,
    SourceDamaged,
    SourceFull,
    WrongBytes,
)
from kvfs.core.pool_layout import QUARANTINE, STRAYS
from kvfs.core.shown_names import printable
from kvfs.core.sizes import count_of, format_size
from kvfs.machine.process_limits import require_file_size, require_open_files

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers
    from kvfs.core.encryption import Encryption
    from kvfs.engine.recovery.fsck_rows import FsckReport


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "fsck",
        run,
        description="Check the pool in SOURCE, which must not be mounted. Without --repair nothing "
        "is written; damage ends with exit code 14.\nOf a pool of several drives give all, or one "
        "by which the others are found; UUID=... of the pool finds all.",
        example="kvfs fsck /dev/nvme0n1 --repair",
    )
    add_sources(parser)
    add_encrypt(parser)
    parser.add_argument("--repair", action="store_true", help="repair what is damaged")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Check and print; the exit code tells whether damage is left."""
    need_root("kvfs fsck")
    args.source = source_of(args.sources)
    report = _check(args.source, encryption_of(args.encrypt), repair=args.repair)
    _print(args, report)
    left = report.found - report.repaired
    if left > 0 and args.repair:
        found = count_of(report.found, "problem")
        raise CheckFailed(f"{args.source}: {left} of {found} could not be repaired")
    if left > 0:
        found = count_of(left, "problem")
        repair = f"`kvfs fsck {args.source} --repair` repairs {'it' if left == 1 else 'them'}"
        raise CheckFailed(f"{args.source}: {found}; {repair}")
    if report.missing:
        drives = ", ".join(f"drive {number} (UUID {uuid})" for number, uuid in report.missing)
        unchecked = count_of(report.unchecked, "block")
        raise DriveMissing(
            f"{args.source}: {drives} cannot be found, so {unchecked} there were not checked; "
            "a mount without it forgets them"
        )
    return 0


def _check(source: str, encryption: "Encryption | None", *, repair: bool) -> "FsckReport":
    from kvfs.core.settings import Settings
    from kvfs.devices import open_source
    from kvfs.engine.recovery.fsck import check_pool

    require_file_size()
    require_open_files(Settings().open_files_max)
    with (
        wanted_pool(source),
        open_source(source, read_only=not repair, encryption=encryption) as device,
        progress_bar("checking", counted=True) as progress,
    ):
        try:
            return check_pool(device, repair=repair, progress=progress)
        except NoSpace as error:
            raise SourceFull(f"{source}: no space for the repair: {error}") from error
        except OSError as error:
            if error.errno in NO_SPACE:
                raise SourceFull(f"{source}: no space for the repair") from error
            raise SourceDamaged(f"{source}: {error.strerror or error}") from error


def _print(args: argparse.Namespace, report: "FsckReport") -> None:
    if args.json:
        result = {
            "source": args.source,
            "problems": report.problems,
            "found": report.found,
            "missing_drives": {str(number): uuid for number, uuid in report.missing},
            "unchecked": report.unchecked,
            "repaired": report.repaired,
            "blocks": report.blocks,
            "directories": report.directories,
            "quarantined": {f"{ino:016x}": held for ino, held in report.quarantined},
            "strays": {
                f"{ino:016x}": {"bytes": held, "since_ns": since_ns}
                for ino, held, since_ns in report.strays
            },
        }
        print(json.dumps(result, indent=2))
        return
    for problem in report.problems:
        print(printable(problem))
    for ino, size_bytes in report.quarantined:
        where = f"{QUARANTINE}/{ino:016x}"
        print(f"in quarantine: inode {ino:#x}, {format_size(size_bytes)}, {where} in the pool")
    for ino, size_bytes, since_ns in report.strays:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(since_ns / 1e9))
        where = f"{STRAYS}/{ino:016x}"
        print(f"no name leads to inode {ino:#x}, {format_size(size_bytes)}, {where}, since {since}")
    found = f"{count_of(report.found, 'problem')}, {report.repaired:,} repaired"
    verdict = found if report.found else "no problem"
    blocks = count_of(report.blocks, "block")
    directories = count_of(report.directories, "directory", "directories")
    print(f"{printable(args.source)}: {blocks}, {directories}, {verdict}")


def configure_verify(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "verify",
        run_verify,
        description="Read the blocks at PATHs and below them from the device, and compare them "
        "with the checksums that were made when they were stored.\nA block with other bytes is "
        "dropped, and its extent kept in the quarantine, which `kvfs fsck` lists.\nEnds with exit "
        "code 26 if there was one. Blocks that left memory too early have no checksum.",
        example="kvfs verify /kv\n  kvfs verify /kv --match 'lmcache/*@8@*'",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    add_match(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_verify(args: argparse.Namespace) -> int:
    """Start the comparison, follow it, and print what it found."""
    where = locate(args.paths)
    done = follow(where, "verify", {"match": args.match}, _shown_verify, quiet=args.json)
    if args.json:
        told = {key: value for key, value in done.items() if key not in ("job", "done")}
        print(json.dumps({"mountpoint": where.mountpoint, **told}, indent=2))
    else:
        blocks = count_of(done["blocks"], "block")
        print(f"{blocks}, {format_size(done['bytes'])} compared: ", end="")
        print(f"{done['wrong']:,} wrong, {done['without_checksum']:,} more without a checksum")
    if done["wrong"]:
        sys.stdout.flush()
        raise WrongBytes(
            f"{count_of(done['wrong'], 'block')} had other bytes than were stored, and are misses "
            "now; kvfs umount, then kvfs fsck lists what is kept of them"
        )
    return 0


def _shown_verify(state: dict[str, Any], _order: dict[str, Any]) -> tuple[str, int, int | None]:
    """Return the text of the progress bar, how much is done, and out of how much."""
    return f"compared {state['blocks']:,}, wrong {state['wrong']:,}", state["blocks"], None
