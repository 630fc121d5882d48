"""Ids and the few value types that all folders share. Nothing here touches the operating system.

An id is a NewType so that a size cannot be passed where an inode number is meant.
"""

from enum import StrEnum
from typing import Final, NamedTuple, NewType

InodeNo = NewType("InodeNo", int)
HandleNo = NewType("HandleNo", int)
BackingId = NewType("BackingId", int)
Sequence = NewType("Sequence", int)
DriveNo = NewType("DriveNo", int)

#: No inode, and no backing file: FUSE, the index and the kernel never give the number 0.
NO_INODE: Final = InodeNo(0)
NO_BACKING_ID: Final = BackingId(0)
#: The root directory's inode number, fixed by FUSE (FUSE_ROOT_ID in linux/fuse.h).
ROOT_INODE: Final = InodeNo(1)
#: The drive whose inode numbers are those of a pool of one drive.
FIRST_DRIVE: Final = DriveNo(0)
#: Numbers below are reserved: 1 is the root, 1 to 3 are readdir cookies of no child.
FIRST_INODE: Final = InodeNo(16)
#: No inode has a higher number.
LAST_INODE: Final = InodeNo((1 << 64) - 1)
#: No inode has this number or a higher one. So an inode number read from a device still fits into
#: 64 bits after kvfs has added the numbers that it skips.
INODE_END: Final = InodeNo(1 << 63)
#: linux/limits.h NAME_MAX; the kernel passes longer names through FUSE, so kvfs must refuse them.
NAME_MAX_BYTES: Final = 255
#: linux/limits.h PATH_MAX, its terminating zero included.
PATH_MAX_BYTES: Final = 4096
#: The longest symlink target.
TARGET_MAX_BYTES: Final = PATH_MAX_BYTES - 1
#: The unit of allocation, of statfs and of O_DIRECT alignment (LMCache aligns by f_bsize).
PAGE_BYTES: Final = 4096
#: A smaller capacity must be a mistake.
CAPACITY_MIN_BYTES: Final = 1 << 20
#: Nanoseconds of a second (timespec(3type)).
SECOND_NS: Final = 1_000_000_000
#: st_blocks counts these, whatever the file system's own block is (stat(2)).
STAT_BLOCK_BYTES: Final = 512
#: The largest offset, because off_t is signed (open(2), EOVERFLOW).
SIZE_MAX_BYTES: Final = (1 << 63) - 1


class InodeRecord(NamedTuple):
    """One inode as the index keeps it.

    Times are nanoseconds since the epoch, signed. ``allocated_bytes`` is what the extent holds on
    the device (st_blocks * 512), ``entries`` and ``subdirs`` count a directory's names. ``parent``
    and ``name`` are the inode's one name. ``target`` is a symlink's, or the number of a block's
    second name, which has a record of its own (inode_rules.py). ``maker_tgid`` and ``maker_birth``
    name the process that a leased block, a slab or a second name belongs to (0: none that can be
    watched).
    """

    mode: int
    uid: int
    gid: int
    state: int
    size_bytes: int
    allocated_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int
    parent: InodeNo
    entries: int
    subdirs: int
    sequence: Sequence
    name: bytes
    target: bytes = b""
    maker_tgid: int = 0
    maker_birth: int = 0


def round_up(size_bytes: int, unit_bytes: int = PAGE_BYTES) -> int:
    """Return *size_bytes* rounded up to a multiple of *unit_bytes*."""
    return -(-size_bytes // unit_bytes) * unit_bytes


class DeviceState(StrEnum):
    """How a device answers a small read, by the time that it takes (pool/space/device_probe.py).

    One that was removed is no drive of the pool any more: it is never the one that answers worst.
    One that is draining answers, and is being emptied; one that is missing was not there at the
    start.
    """

    REMOVED = "removed"
    SERVING = "serving"
    DRAINING = "draining"
    SLOW = "slow"
    SILENT = "silent"
    MISSING = "missing"
    FAILED = "failed"
