"""The blocks that were used last, as the heat says, for `kvfs warm --hottest`.

A stop writes the heat to HEAT (docs/dev/format.md), and the next start reads it. So after a start
these are the blocks that were hot before it.
"""

import stat
from typing import Final

import numpy as np

from kvfs.core.eviction_policy import EVICTABLE, Columns, Rank
from kvfs.core.lifecycle import SETTLED
from kvfs.core.types import InodeNo
from kvfs.pool.pool import Pool
from kvfs.pool.rules.paths import path_of

#: A list is kept in memory while a client fetches it: 512 KiB.
HOTTEST_MAX: Final = 1 << 16
_RANKS: Final = tuple(int(rank) for rank in (*EVICTABLE, Rank.KEPT))


def hottest(columns: Columns, count_max: int = HOTTEST_MAX) -> list[InodeNo]:
    """Return the inodes touched last, the last one first; may run in a thread.

    It takes some 130 ms for a million rows.
    """
    rows = np.flatnonzero((columns.ino != 0) & np.isin(columns.rank, _RANKS))
    touched = columns.touched[rows]
    if len(rows) > count_max:
        part = np.argpartition(touched, len(rows) - count_max)[len(rows) - count_max :]
        rows, touched = rows[part], touched[part]
    order = np.argsort(touched, kind="stable")[::-1]
    return [InodeNo(int(ino)) for ino in columns.ino[rows[order]]]


def path_and_size(pool: Pool, ino: InodeNo) -> tuple[str, int] | None:
    """Return the path of block *ino* below the mountpoint, and its bytes.

    None if it is gone, or if its path is too long for any call.
    """
    record = pool.index.inode_or_miss(ino)
    if record is None or not stat.S_ISREG(record.mode) or record.state not in SETTLED:
        return None
    path = path_of(pool.index, ino)
    return (path, record.allocated_bytes) if path.startswith("/") else None
