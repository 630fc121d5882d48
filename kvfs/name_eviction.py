"""Blocks that go for their names: the index takes no more of them, whatever the blocks hold.

Apart from ``Reclaim``, which counts bytes: by these the few large blocks would go for the names
of many small ones, and an empty one never.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.eviction import Columns, coldest_names
from kvfs.pool import Pool
from kvfs.reclaim import Reclaim
from kvfs.types import InodeNo
from kvfs.victims import Victims

#: As in ``Reclaim``: names in one index transaction, and in one call.
_BATCH: Final = 32
_CALL_MAX: Final = 256
#: A hundred million rows take some seconds to look at, however few names are too many: the plan
#: is to last for longer than that.
_PLAN_PART: Final = 64
_PLAN_MAX: Final = 1 << 16
#: After a plan that named nobody no other one begins for so long.
_BARREN_S: Final = 1.0


class NameEviction:
    """Keeps the names to as many as the index's map takes; never fewer for it."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool = pool
        self._reclaim = reclaim
        self._victims = Victims(pool, barren_s=_BARREN_S)

    def tick(self) -> None:
        """Let go of as many blocks as there are names too many, in turns of milliseconds."""
        excess = self._excess()
        looked_at = 0
        while looked_at < min(excess, _CALL_MAX):
            batch = self._next_batch(min(_BATCH, excess - looked_at))
            if not batch and not self._replan(excess):
                return
            self._take(batch)
            looked_at += len(batch)

    def make_room(self) -> None:
        """Do so at once: the index would refuse the next name."""
        self.tick()
        self._pool.index.room.look()

    def _excess(self) -> int:
        counters = self._pool.counters
        nodes = counters.directories + counters.symlinks + counters.others
        return self._pool.index.room.excess_names(counters.blocks + nodes)

    def _next_batch(self, size: int) -> list[InodeNo]:
        named = (self._victims.next() for _ in range(size))
        return [ino for ino in named if ino is not None]

    def _take(self, batch: list[InodeNo]) -> None:
        self._reclaim.take(batch, open_too=False)
        for ino in batch:
            if ino in self._pool.heat:
                self._victims.refuse(ino)

    def _replan(self, count: int) -> bool:
        if self._victims.takes_long:
            count = max(count, len(self._pool.heat) // _PLAN_PART)
        count = min(count, _PLAN_MAX)

        def choose(columns: Columns, but_not: NDArray[np.uint64]) -> NDArray[np.uint64]:
            return coldest_names(columns, count, but_not)

        return self._victims.replan(choose)
