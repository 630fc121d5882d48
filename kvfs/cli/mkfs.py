"""``kvfs mkfs``, ``kvfs destroy``: make an empty pool, and remove one with every block in it."""

import argparse
import sys
from typing import TYPE_CHECKING

from kvfs.cli.arguments import size_of, wanted_pool
from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.core.errors import UsageError
from kvfs.core.shown_names import printable
from kvfs.machine.process_limits import require_file_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "mkfs",
        run,
        description="Make an empty pool. SOURCE is a block device (formatted with XFS), an image "
        "file (created if missing, with\n--capacity bytes and what the file system needs, and "
        "allocated in full) or a directory on XFS, ext4 or tmpfs.\nA SOURCE that is not blank is "
        "refused, unless --force is given.",
        example="kvfs mkfs /dev/nvme0n1\n  kvfs mkfs /var/lib/kv.img --capacity 20G",
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument(
        "--capacity", metavar="SIZE", help="limit for the data, e.g. 500G (default: all of SOURCE)"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite what SOURCE holds (never a directory's other files)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the pool."""
    capacity_bytes = size_of(args.capacity, "--capacity")
    need_root("kvfs mkfs")
    from kvfs.devices import format_source, new_image_note
    from kvfs.engine.recovery.rebuild import found_pool

    require_file_size()
    note = new_image_note(args.source, capacity_bytes)
    format_source(args.source, capacity_bytes=capacity_bytes, force=args.force, fill=found_pool)
    if note:
        print(f"kvfs: {printable(note)}", file=sys.stderr)
    return 0


def configure_destroy(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "destroy",
        run_destroy,
        description="Remove the pool in SOURCE. A SOURCE that is not a pool, or is mounted, is "
        "refused and left as it is.",
        example="kvfs destroy /dev/nvme0n1 --yes",
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run_destroy(args: argparse.Namespace) -> int:
    """Ask, then remove."""
    need_root("kvfs destroy")
    if not args.yes and not _confirmed(args.source):
        print("nothing was changed", file=sys.stderr)
        return 1
    from kvfs.devices import destroy_source

    with wanted_pool(args.source):
        destroy_source(args.source)
    return 0


def _confirmed(source: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("destroy asks before it removes; without a terminal, give --yes")
    print(f"Remove the pool in {source} with every block in it? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
