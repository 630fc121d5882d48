"""How much of a device blocks may use: pure arithmetic, with a reason for each number."""

from typing import Final, NamedTuple

from kvfs.core.settings import Settings
from kvfs.core.sizes import GIB, MIB
from kvfs.core.types import round_up

#: The least space for blocks in a new directory pool. Less is of no use.
ROOM_MIN_BYTES: Final = 64 * MIB
#: mkfs.xfs (xfsprogs 5.19 and later) refuses anything smaller.
XFS_MIN_BYTES: Final = 300 * MIB
#: mkfs.xfs makes the log 1/2048 of the device within these bounds, and drops a last allocation
#: group below 16 MiB (xfs_mkfs.c, calculate_log_size and align_ag_geometry).
_XFS_LOG_PART: Final = 2048
_XFS_LOG_MIN_BYTES: Final = 64 * MIB
_XFS_LOG_MAX_BYTES: Final = 2 * GIB
_XFS_TAIL_BYTES: Final = 16 * MIB
#: No rule below may take more than this part of a small file system.
_SMALL_PART: Final = 4


class Reserve(NamedTuple):
    """What a directory source leaves to other users of its file system."""

    share: float = Settings().directory_reserve_share
    most_bytes: int = Settings().directory_reserve_bytes


def reserve_bytes(total_bytes: int, reserve: Reserve) -> int:
    """Return how many bytes of a parent file system blocks must leave free.

    At least 1 GiB, since a full file system stops not only kvfs, unless the settings or a quarter
    of the file system are less. A share of 0 reserves nothing.
    """
    if reserve.share <= 0:
        return 0
    wanted_bytes = min(max(GIB, int(total_bytes * reserve.share)), reserve.most_bytes)
    return min(wanted_bytes, total_bytes // _SMALL_PART)


def metadata_bytes(total_bytes: int) -> int:
    """Return the bytes that the index and the file system's inodes and trees may need.

    1 % is enough for 1.5 KiB of inode and index for every 150 KiB of blocks; 128 MiB are enough for
    the index's preallocation on small devices.
    """
    return min(max(128 * MIB, total_bytes // 100), total_bytes // _SMALL_PART)


def xfs_usable_bytes(size_bytes: int) -> int:
    """Return how many bytes blocks can use, at least, of an XFS made on *size_bytes*."""
    log_bytes = min(max(size_bytes // _XFS_LOG_PART, _XFS_LOG_MIN_BYTES), _XFS_LOG_MAX_BYTES)
    total_bytes = max(0, size_bytes - log_bytes - _XFS_TAIL_BYTES)
    return total_bytes - metadata_bytes(total_bytes)


def image_size_bytes(capacity_bytes: int) -> int:
    """Return the size, in whole MiB, of an image into which *capacity_bytes* of blocks fit."""
    size_bytes = max(capacity_bytes, XFS_MIN_BYTES)
    while (lacking_bytes := capacity_bytes - xfs_usable_bytes(size_bytes)) > 0:
        size_bytes = round_up(size_bytes + lacking_bytes, MIB)
    return size_bytes
