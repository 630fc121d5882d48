"""Evicting blocks because the index has too many names, however many bytes the blocks hold.

``Reclaim`` counts bytes. It would evict a few large blocks where many small ones have the names,
and never an empty one.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.core.eviction_policy import Columns, coldest_empty, coldest_names
from kvfs.core.eviction_reason import Reason
from kvfs.core.types import InodeNo
from kvfs.engine.eviction.reclaim import BATCH, CALL_MAX, Reclaim
from kvfs.engine.eviction.victims import Victims
from kvfs.pool.pool import Pool

#: A plan from a long scan has at least 1/64 of all blocks. A scan of a hundred million rows takes
#: some seconds, and its plan should last longer than that.
_PLAN_PART: Final = 64
_PLAN_MAX: Final = 1 << 16
#: After a plan that found nothing, no other one begins for this long.
_BARREN_S: Final = 1.0


#: Returns up to so many blocks in the order of eviction, but none of those in the array.
_Coldest = Callable[[Columns, int, NDArray[np.uint64]], NDArray[np.uint64]]


class NameEviction:
    """Evicts as many names as the index's map or the device has too many, and no more."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool = pool
        self._of_all = _Turns(pool, reclaim, coldest_names)
        #: Evicts empty files, if the device has less space than the capacity.
        self._of_empty = _Turns(pool, reclaim, coldest_empty)

    def tick(self) -> None:
        """Evict as many blocks as there are names too many, in turns of milliseconds."""
        self._of_all.take(self._excess())
        self._of_empty.take(self._pool.empty_names_too_many())

    def make_room(self) -> None:
        """Evict names at once, because the index would refuse the next one."""
        self.tick()
        self._pool.index.room.look()

    def _excess(self) -> int:
        counters = self._pool.counters
        nodes = counters.directories + counters.symlinks + counters.others
        return self._pool.index.room.excess_names(counters.blocks + nodes)


class _Turns:
    """Evicts the blocks that one rule chooses, a turn at a time."""

    def __init__(self, pool: Pool, reclaim: Reclaim, coldest: _Coldest) -> None:
        self._pool = pool
        self._reclaim = reclaim
        self._coldest = coldest
        self._victims = Victims(pool, barren_s=_BARREN_S)

    def take(self, excess: int) -> None:
        """Evict some of *excess* blocks: as many as fit into one turn."""
        looked_at = 0
        while looked_at < min(excess, CALL_MAX):
            batch = self._next_batch(min(BATCH, excess - looked_at))
            if not batch and not self._replan(excess):
                return
            self._let_go(batch)
            looked_at += len(batch)

    def _next_batch(self, size: int) -> list[InodeNo]:
        named = (self._victims.next() for _ in range(size))
        return [ino for ino in named if ino is not None]

    def _let_go(self, batch: list[InodeNo]) -> None:
        self._reclaim.take(batch, open_too=False, reason=Reason.NAMES)
        for ino in batch:
            if ino in self._pool.heat:
                self._victims.refuse(ino)

    def _replan(self, count: int) -> bool:
        if self._victims.takes_long:
            count = max(count, len(self._pool.heat) // _PLAN_PART)
        count = min(count, _PLAN_MAX)

        def choose(columns: Columns, but_not: NDArray[np.uint64]) -> NDArray[np.uint64]:
            return self._coldest(columns, count, but_not)

        return self._victims.replan(choose)
