"""The names of everything in a pool directory, and what an XFS for it is made with. Pure text.

docs/dev/format.md says what each file is.
"""

from collections.abc import Iterator
from typing import Final

from kvfs.core.types import INODE_END, InodeNo

POOL: Final = "POOL"
POOL_NEW: Final = "POOL.new"
RUN: Final = "RUN"
RUN_NEW: Final = "RUN.new"
LOCK: Final = "LOCK"
INODES: Final = "INODES"
HEAT: Final = "HEAT"
HEAT_NEW: Final = "HEAT.new"
DEVICE: Final = "DEVICE"
DEVICE_NEW: Final = "DEVICE.new"
#: What an earlier version had in place of the log; a start removes it.
CHECKPOINT: Final = "CHECKPOINT"
#: All files except POOL, whose presence makes a directory a pool.
FILES: Final = (
    RUN,
    RUN_NEW,
    INODES,
    HEAT,
    HEAT_NEW,
    DEVICE,
    DEVICE_NEW,
    CHECKPOINT,
    POOL_NEW,
    LOCK,
)

INDEX: Final = "index"
#: What an interrupted rebuild or compaction leaves.
INDEX_NEW: Final = "index.new"
INDEX_OLD: Final = "index.old"
INDEXES: Final = (INDEX, INDEX_NEW, INDEX_OLD)
#: The files in each of these directories.
DATA_NAME: Final = "data.mdb"
LOCK_NAME: Final = "lock.mdb"

#: Copies of the index, and the rows committed since.
LOG: Final = "log"
COPIES: Final = ("copy.0", "copy.1")
_LOG_FILE: Final = "rows."

EXTENTS: Final = "extents"
IDENTITIES: Final = "identities"
#: Extents whose bytes fail their checksum.
QUARANTINE: Final = "quarantine"
STRAYS: Final = "strays"
FAN_OUTS: Final = (EXTENTS, IDENTITIES)
#: Directories in a fan-out. The low bits of the inode number choose one, so that a range of new
#: inodes spreads over all of them and, on XFS, over its allocation groups.
FAN_OUT: Final = 256

#: The two xattrs of an identity fit into an inode of this size (in a smaller one each takes a block
#: of its own, and 30 us instead of 4). Inodes may take all of the device, so that many small blocks
#: do not get ENOSPC while space is free. (mkfs.xfs ignores maxpct=0.)
XFS_INODE_BYTES: Final = 1024
XFS_INODES: Final = f"size={XFS_INODE_BYTES},maxpct=100"
#: Extents are neither shared nor repaired online. Each of these trees would reserve space in every
#: allocation group and cost an update per allocation.
XFS_TREES: Final = "reflink=0,rmapbt=0"


def fan_out_directories(top: str) -> Iterator[str]:
    """Yield the path of each directory of fan-out *top*."""
    return (fan_out_directory(top, slot) for slot in range(FAN_OUT))


def fan_out_directory(top: str, slot: int) -> str:
    """Return the path of directory *slot* of fan-out *top*."""
    return f"{top}/{fan_out_name(slot)}"


def fan_out_name(slot: int) -> str:
    """Return the name of directory *slot* inside its fan-out."""
    return f"{slot:02x}"


def file_name(ino: InodeNo) -> str:
    """Return the name of *ino*'s file inside its fan-out directory."""
    return f"{ino:016x}"


def parse_file_name(name: str) -> InodeNo | None:
    """Return the inode number that *name* stands for, or None for a name kvfs never gives."""
    number = _parse_number(name)
    return InodeNo(number) if number is not None and number < INODE_END else None


def _parse_number(digits: str) -> int | None:
    """Return the number of 16 lower-case hex *digits*, None for anything else."""
    if len(digits) != 16 or digits.strip("0123456789abcdef"):
        return None
    return int(digits, 16)


def log_file_name(first: int) -> str:
    """Return the name of the log's file that begins with batch *first*."""
    return f"{_LOG_FILE}{first:016x}"


def parse_log_file_name(name: str) -> int | None:
    """Return the number of the first batch in the log's file *name*, None for another file."""
    return _parse_number(name.removeprefix(_LOG_FILE)) if name.startswith(_LOG_FILE) else None
