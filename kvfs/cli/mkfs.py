"""``kvfs mkfs``, ``kvfs destroy``: make an empty pool, and remove one with every block in it."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvfs.cli.arguments import (
    absolute_sources,
    add_encrypt,
    add_sources,
    encryption_of,
    size_of,
    source_of,
    wanted_pool,
)
from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import LEAST_COLUMNS, Column, columns_for_tables, table_lines
from kvfs.core.errors import UsageError
from kvfs.core.shown_names import printable
from kvfs.core.sizes import format_size
from kvfs.core.source_list import sources_of
from kvfs.machine.process_limits import require_file_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers
    from kvfs.devices import PoolHeader


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "mkfs",
        run,
        description="Make an empty pool. SOURCE is a block device (formatted with XFS), an image "
        "file (created if missing, with\n--capacity bytes and what the file system needs, and "
        "allocated in full) or a directory on XFS, ext4 or tmpfs.\nSeveral make one pool, each "
        "block on one of them. A SOURCE that is not blank is refused, unless --force is given.\n"
        "Nothing is written unless all can be used.",
        example="kvfs mkfs /dev/nvme0n1\n  kvfs mkfs /var/lib/kv.img --capacity 20G",
    )
    add_sources(parser)
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="limit for the data, e.g. 500G, in equal parts (default: all of each SOURCE)",
    )
    add_encrypt(parser)
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite what SOURCE holds (never a directory's other files)",
    )
    parser.add_argument("--json", action="store_true", help="print what was made as JSON")


def run(args: argparse.Namespace) -> int:
    """Make the pool."""
    capacity_bytes = size_of(args.capacity, "--capacity")
    encryption = encryption_of(args.encrypt)
    need_root("kvfs mkfs")
    from kvfs.devices import format_drives, new_image_notes
    from kvfs.engine.recovery.rebuild import found_pool

    require_file_size()
    sources = sources_of(source_of(args.sources))
    notes = list(new_image_notes(sources, capacity_bytes, encryption))
    headers = format_drives(
        sources,
        capacity_bytes=capacity_bytes,
        force=args.force,
        fill=found_pool,
        encryption=encryption,
    )
    for note in notes:
        print(f"kvfs: {printable(note)}", file=sys.stderr)
    if args.json:
        print(json.dumps(_told(absolute_sources(sources), headers), indent=2))
    elif len(sources) > 1:
        _print(sources, headers)
    return 0


def _told(sources: Sequence[str], headers: "Sequence[PoolHeader]") -> dict[str, object]:
    drives = [
        {
            "drive": header.drive,
            "source": source,
            "uuid": header.uuid,
            "capacity_bytes": header.capacity_bytes,
        }
        for source, header in zip(sources, headers, strict=True)
    ]
    return {"uuid": headers[0].uuid, "drives": drives}


def _print(sources: Sequence[str], headers: "Sequence[PoolHeader]") -> None:
    columns = (Column("drive", right=True), Column("capacity", right=True), Column("UUID"))
    rows = [
        (
            f"{header.drive}",
            "all of it" if header.capacity_bytes is None else format_size(header.capacity_bytes),
            header.uuid,
            printable(source),
        )
        for source, header in zip(sources, headers, strict=True)
    ]
    for line in table_lines(
        (*columns, Column("source", folds=True)), rows, columns_for_tables(LEAST_COLUMNS)
    ):
        print(line)


def configure_destroy(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "destroy",
        run_destroy,
        description="Remove the pool in SOURCE; of an encrypted one erase the key first. A SOURCE "
        "that is not a pool, or is mounted, is refused and left as it is.\nOf a pool of several "
        "drives give all, or UUID=... of the pool.",
        example="kvfs destroy /dev/nvme0n1 --yes",
    )
    add_sources(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run_destroy(args: argparse.Namespace) -> int:
    """Ask, then remove."""
    need_root("kvfs destroy")
    source = source_of(args.sources)
    if not args.yes and not _confirmed(source):
        print("nothing was changed", file=sys.stderr)
        return 1
    from kvfs.devices import destroy_source

    with wanted_pool(source):
        destroy_source(source)
    return 0


def _confirmed(source: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("destroy asks before it removes; without a terminal, give --yes")
    print(f"Remove the pool in {source} with every block in it? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
