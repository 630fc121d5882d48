"""Evicting blocks for their names: the index is full, whatever the blocks hold.

Apart from ``Reclaim``, which counts bytes: by these the few large blocks would go for the names
of many small ones, and an empty one never.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.core.eviction_policy import Columns, coldest_empty, coldest_names
from kvfs.core.types import InodeNo
from kvfs.engine.eviction.reclaim import BATCH, CALL_MAX, Reclaim
from kvfs.engine.eviction.victims import Victims
from kvfs.pool.name_room import empty_names_too_many
from kvfs.pool.pool import Pool

#: A hundred million rows take some seconds to look at, however few names are too many: the plan
#: is to last for longer than that.
_PLAN_PART: Final = 64
_PLAN_MAX: Final = 1 << 16
#: After a plan that named nobody no other one begins for so long.
_BARREN_S: Final = 1.0


#: Names some blocks, first to go first; none of those in the array.
_Coldest = Callable[[Columns, int, NDArray[np.uint64]], NDArray[np.uint64]]


class NameEviction:
    """Keeps the names to as many as the index's map and the device take; never fewer for it."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool = pool
        self._of_all = _Turns(pool, reclaim, coldest_names)
        #: Of a device that is short of room for blocks.
        self._of_empty = _Turns(pool, reclaim, coldest_empty)

    def tick(self) -> None:
        """Let go of as many blocks as there are names too many, in turns of milliseconds."""
        self._of_all.take(self._excess())
        self._of_empty.take(empty_names_too_many(self._pool))

    def make_room(self) -> None:
        """Do so at once: the index would refuse the next name."""
        self.tick()
        self._pool.index.room.look()

    def _excess(self) -> int:
        counters = self._pool.counters
        nodes = counters.directories + counters.symlinks + counters.others
        return self._pool.index.room.excess_names(counters.blocks + nodes)


class _Turns:
    """Takes the names of those that one rule names."""

    def __init__(self, pool: Pool, reclaim: Reclaim, coldest: _Coldest) -> None:
        self._pool = pool
        self._reclaim = reclaim
        self._coldest = coldest
        self._victims = Victims(pool, barren_s=_BARREN_S)

    def take(self, excess: int) -> None:
        """Let some of *excess* blocks go: what one turn can."""
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
        self._reclaim.take(batch, open_too=False)
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
