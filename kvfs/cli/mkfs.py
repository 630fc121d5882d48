"""``kvfs mkfs``: make an empty pool."""

import argparse
from typing import TYPE_CHECKING

from kvfs.cli.caller import need_root
from kvfs.cli.parser import add_verb
from kvfs.core.errors import UsageError
from kvfs.core.sizes import parse_size
from kvfs.machine.process_limits import require_file_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "mkfs",
        run,
        description="Make an empty pool. SOURCE is a block device (it gets an XFS), an image file "
        "(it is made with --capacity bytes,\nif it is not there, and allocated in full) or a "
        "directory on XFS, ext4 or tmpfs. Anything but a blank SOURCE is refused,\nunless with "
        "--force.",
        example="kvfs mkfs /dev/nvme0n1\n  kvfs mkfs /var/lib/kv.img --capacity 20G",
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument(
        "--capacity", metavar="SIZE", help="most bytes of blocks, e.g. 500G (default: all of it)"
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


def size_of(text: str | None, flag: str) -> int | None:
    """Return the bytes of the flag's *text*; raises UsageError when it is no positive size."""
    if text is None:
        return None
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if size_bytes == 0:
        raise UsageError(f"{flag}: 0 is no size")
    return size_bytes
