"""How much of a device blocks may use: pure arithmetic, one reason a number."""

from typing import Final, NamedTuple

from kvfs.core.types import round_up

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
#: Room for less is of no use, and an XFS with its log does not fit.
ROOM_MIN_BYTES: Final = 64 * _MIB
#: mkfs.xfs (xfsprogs 5.19 and later) refuses anything smaller.
XFS_MIN_BYTES: Final = 300 * _MIB
#: mkfs.xfs makes the log 1/2048 of the device within these bounds, and drops a last allocation
#: group below 16 MiB (xfs_mkfs.c, calculate_log_size and align_ag_geometry).
_XFS_LOG_PART: Final = 2048
_XFS_LOG_MIN_BYTES: Final = 64 * _MIB
_XFS_LOG_MAX_BYTES: Final = 2 * _GIB
_XFS_TAIL_BYTES: Final = 16 * _MIB
#: No rule below may take more than this part of a small file system.
_SMALL_PART: Final = 4


class Reserve(NamedTuple):
    """What a directory source leaves to the others on its file system.

    The defaults are those of the settings directory_reserve_share and directory_reserve_bytes.
    """

    share: float = 0.05
    most_bytes: int = 10 * _GIB


def reserve_bytes(total_bytes: int, reserve: Reserve) -> int:
    """Return the bytes of a parent file system that blocks must leave free.

    At least 1 GiB, since a full parent stops more than kvfs, but never over a quarter of it; a
    share of 0 leaves nothing.
    """
    if reserve.share <= 0:
        return 0
    wanted_bytes = min(max(_GIB, int(total_bytes * reserve.share)), reserve.most_bytes)
    return min(wanted_bytes, total_bytes // _SMALL_PART)


def metadata_bytes(total_bytes: int) -> int:
    """Return what the index and the file system's own inodes and trees may need beside blocks.

    1 % holds 1.5 KiB of inode and index for every 150 KiB of blocks; 128 MiB holds the index's
    preallocation on small devices.
    """
    return min(max(128 * _MIB, total_bytes // 100), total_bytes // _SMALL_PART)


def xfs_usable_bytes(size_bytes: int) -> int:
    """Return what blocks may use, at least, of an XFS that is made on *size_bytes*."""
    log_bytes = min(max(size_bytes // _XFS_LOG_PART, _XFS_LOG_MIN_BYTES), _XFS_LOG_MAX_BYTES)
    total_bytes = max(0, size_bytes - log_bytes - _XFS_TAIL_BYTES)
    return total_bytes - metadata_bytes(total_bytes)


def image_size_bytes(capacity_bytes: int) -> int:
    """Return the size of an image that *capacity_bytes* of blocks fit into, a whole MiB."""
    size_bytes = max(capacity_bytes, XFS_MIN_BYTES)
    while (lacking_bytes := capacity_bytes - xfs_usable_bytes(size_bytes)) > 0:
        size_bytes = round_up(size_bytes + lacking_bytes, _MIB)
    return size_bytes
