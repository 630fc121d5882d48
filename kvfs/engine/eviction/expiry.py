"""Evicts blocks that were unused for longer than their directory's policy ``ttl``.

Each tick reads a part of the heat. A row that is old enough for the shortest ttl is looked at
again, with the policy of its directory. So a tick takes a few milliseconds, whatever the pool
holds. A block stays while it is unknown whether it was used within its ttl.
"""

import math
from typing import Final

import numpy as np

from kvfs.core.eviction_policy import EVICTABLE
from kvfs.core.eviction_reason import Reason
from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.engine.eviction.eligibility import used_since
from kvfs.engine.eviction.reclaim import BATCH, Reclaim
from kvfs.pool.pool import Pool

#: Rows of the heat read in one tick (some 50 us), blocks looked at (some 6 us each), and evicted
#: (some 35 us each).
_ROWS: Final = 8192
_CANDIDATES: Final = 256
_EVICTED: Final = 2 * BATCH
#: The pause from one pass to the next: a part of the shortest ttl, within bounds.
_PAUSE_PART: Final = 1 / 16
_PAUSE_LEAST_S: Final = 0.25
_PAUSE_MOST_S: Final = 60.0
_RANKS: Final = tuple(int(rank) for rank in EVICTABLE)


class Expiry:
    """The passes through the heat of one pool."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool = pool
        self._reclaim = reclaim
        #: The row at which the next tick goes on, and when the next pass begins.
        self._row = 0
        self._due_s = -math.inf
        #: The shortest ttl when the next pass was put off; if it changes, the pass does not wait.
        self._paused_for_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Go on with the present pass, or begin one that is due."""
        ttl_s = self._pool.policies.shortest_ttl_s
        if ttl_s is None or (now_s < self._due_s and ttl_s == self._paused_for_s):
            return
        now_ns = self._pool.age_ns()
        stamp = self._pool.heat.stamp_at(now_ns - int(ttl_s * SECOND_NS))
        if stamp is not None and self._go_on(stamp, now_ns):
            return
        self._row = 0
        self._paused_for_s = ttl_s
        self._due_s = now_s + min(max(_PAUSE_PART * ttl_s, _PAUSE_LEAST_S), _PAUSE_MOST_S)

    def _go_on(self, stamp: int, now_ns: int) -> bool:
        """Look at some rows that were touched before *stamp*; return whether some are left."""
        columns = self._pool.heat.columns()
        rows = slice(self._row, self._row + _ROWS)
        is_old = (columns.ino[rows] != 0) & (columns.touched[rows] < stamp)
        found = np.flatnonzero(is_old & np.isin(columns.rank[rows], _RANKS)).tolist()
        expired: list[InodeNo] = []
        for count, at in enumerate(found):
            if count == _CANDIDATES or len(expired) == _EVICTED:
                self._row += at
                break
            ino = InodeNo(int(columns.ino[self._row + at]))
            if self._is_expired(ino, now_ns):
                expired.append(ino)
        else:
            self._row += _ROWS
        for start in range(0, len(expired), BATCH):
            batch = expired[start : start + BATCH]
            self._reclaim.take(batch, open_too=False, reason=Reason.TTL)
        return self._row < len(columns.ino)

    def _is_expired(self, ino: InodeNo, now_ns: int) -> bool:
        record = self._pool.index.inode_or_miss(ino)
        if record is None:
            return False
        ttl_s = self._pool.policies.of(record.parent).ttl_s
        if ttl_s is None:
            return False
        return used_since(self._pool, ino, record, now_ns - int(ttl_s * SECOND_NS)) is False
