"""``kvfs mkfs``: make an empty pool."""

import argparse
from typing import TYPE_CHECKING

from kvfs.cli.arguments import size_of
from kvfs.cli.caller import need_root
from kvfs.cli.parser import add_verb
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
        "file (created with --capacity bytes\nif missing, and allocated in full) or a directory on "
        "XFS, ext4 or tmpfs. A SOURCE that is not blank is refused,\nunless --force is given.",
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
    from kvfs.devices import format_source
    from kvfs.engine.recovery.new_pool import found_pool

    require_file_size()
    format_source(args.source, capacity_bytes=capacity_bytes, force=args.force, fill=found_pool)
    return 0
