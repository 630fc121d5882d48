"""What directories, symlinks and attributes take of the device: never evicted, so they are bounded.

Pure. What a name costs is the sum of its rows in the index, of an inode, and of a symlink's block;
XFS's inodes have 1 KiB in a pool that kvfs made. Blocks, which go for others, are not counted.
"""

from typing import Final

from kvfs.records import Counters

#: Of the capacity, for all that users other than root make.
_SHARE: Final = 1 / 4
#: Less than that is no bound: a small pool is for tests, and its directories are few.
_LEAST_BYTES: Final = 8 << 20
#: Rows of a block: its name, its child row and its inode (docs/eviction.md).
_BLOCK_ROWS_BYTES: Final = 550
_INODE_BYTES: Final = 1 << 10
_SYMLINK_BLOCK_BYTES: Final = 4 << 10


def taken_bytes(counters: Counters, rows_bytes: int) -> int:
    """Return about how many bytes of the device go for what is never evicted."""
    nodes = counters.directories + counters.symlinks + counters.others
    own_rows_bytes = max(0, rows_bytes - counters.blocks * _BLOCK_ROWS_BYTES)
    return own_rows_bytes + nodes * _INODE_BYTES + counters.symlinks * _SYMLINK_BLOCK_BYTES


def admits(counters: Counters, rows_bytes: int, capacity_bytes: int) -> bool:
    """Whether one more may be made by a user in a pool of *capacity_bytes*."""
    most_bytes = max(_LEAST_BYTES, int(capacity_bytes * _SHARE))
    return taken_bytes(counters, rows_bytes) < most_bytes
