"""Blocks that go for their names: the index takes no more of them, whatever the blocks hold.

Apart from ``Reclaim``, which counts bytes: by these the few large blocks would go for the names
of many small ones, and an empty one never.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.eviction import coldest_names
from kvfs.pool import Pool
from kvfs.reclaim import Reclaim
from kvfs.types import InodeNo

#: As in ``Reclaim``: names in one index transaction, and in one call.
_BATCH: Final = 32
_CALL_MAX: Final = 256
#: Up to so many rows a scan takes less than a request may wait, and needs no thread.
_INLINE_ROWS: Final = 16_384
#: A hundred million rows take some seconds to look at, however few names are too many: the plan
#: is to last for longer than that.
_PLAN_PART: Final = 64
_PLAN_MAX: Final = 1 << 16
#: After a plan that named nobody, or a batch that failed, no other one begins for so long.
_BARREN_S: Final = 1.0
#: Rows that were looked at in vain, and are left out of the next plans.
_REFUSED_MAX: Final = 4096


class NameEviction:
    """Keeps the names to as many as the index's map takes; never fewer for it."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool = pool
        self._reclaim = reclaim
        self._queue: deque[InodeNo] = deque()
        self._plan: NDArray[np.uint64] | None = None
        self._planning = False
        #: The heat's clock when the plan began: who was touched since is not what it named.
        self._stamp = 0
        self._barren_until_s = 0.0
        self._refused: dict[InodeNo, None] = {}

    def tick(self, now_s: float) -> None:
        """Let go of as many blocks as there are names too many, in turns of milliseconds."""
        excess = self._excess()
        looked_at = 0
        while looked_at < min(excess, _CALL_MAX):
            if not self._queue and not self._replan(excess, now_s):
                return
            size = min(_BATCH, excess - looked_at, len(self._queue))
            batch = [self._queue.popleft() for _ in range(size)]
            self._take(batch)
            looked_at += size

    def make_room(self) -> None:
        """Do so at once: the index would refuse the next name."""
        self.tick(self._pool.monotonic_s())
        self._pool.index.room.look()

    def _excess(self) -> int:
        counters = self._pool.counters
        nodes = counters.directories + counters.symlinks + counters.others
        return self._pool.index.room.excess_names(counters.blocks + nodes)

    def _take(self, batch: list[InodeNo]) -> None:
        heat = self._pool.heat
        cold = [ino for ino in batch if heat.touched(ino) < self._stamp]
        self._reclaim.take(cold, open_too=False)
        self._refused.update((ino, None) for ino in cold if ino in heat)

    def _replan(self, count: int, now_s: float) -> bool:
        """Get more victims; True if there are some now."""
        if self._plan is None and not self._planning and now_s >= self._barren_until_s:
            rows = len(self._pool.heat)
            if rows > _INLINE_ROWS:
                count = max(count, rows // _PLAN_PART)
            scan = self._scan(min(count, _PLAN_MAX))
            if rows > _INLINE_ROWS:
                self._planning = True
                self._pool.background.submit_long(functools.partial(self._in_the_thread, scan))
            else:
                self._plan = scan()
        plan, self._plan = self._plan, None
        if plan is None:
            return False
        self._queue.extend(InodeNo(int(ino)) for ino in plan)
        if not self._queue:
            self._barren_until_s = now_s + _BARREN_S
            self._refused.clear()
        return bool(self._queue)

    def _scan(self, count: int) -> Callable[[], NDArray[np.uint64]]:
        heat = self._pool.heat
        if len(self._refused) > _REFUSED_MAX:
            self._refused.clear()
        but_not = np.fromiter(self._refused, np.uint64, len(self._refused))
        columns, self._stamp = heat.columns(), heat.stamp
        return lambda: coldest_names(columns, count, but_not)

    def _in_the_thread(self, scan: Callable[[], NDArray[np.uint64]]) -> None:
        try:
            self._plan = scan()
        finally:
            self._planning = False
