"""Which blocks leave memory, and where to: to their drive, or for good.

What moves to its drive: a block that was used a second time, also one that was asked for before it
was stored (``Heat.put``), one that a hint retains, and one that the gate finds worth it (gate.py).
Of all others the one that came first is evicted when new ones need room. What may not be evicted
then, a lease or a pin say, moves. A stop leaves nothing in memory.
"""

import math
from collections.abc import Callable
from typing import Final

from kvfs.core.changed import Reason
from kvfs.core.eviction_policy import Rank
from kvfs.core.types import InodeNo
from kvfs.engine.blocks.moves import Moves
from kvfs.engine.blocks.outgrown import Outgrown
from kvfs.engine.blocks.successors import Successors
from kvfs.engine.eviction.reclaim import CALL_MAX, Reclaim
from kvfs.engine.eviction.victims import look_at
from kvfs.machine.hardware import memory_pressure
from kvfs.pool.open.probation import Probation
from kvfs.pool.pool import Pool
from kvfs.storage.memory_files import MemoryFiles

#: Uses in so many bursts prove a block; its store is one (``Heat.touches``).
_PROVEN_TOUCHES: Final = 2
#: Blocks looked at in one tick, some 1 us each: 4,000 a second, and few stores are more.
_LOOKS_A_TICK: Final = 1024
#: The share of the room that is kept free ahead of drafts: a quarter of a second's.
_FREE_SHARE: Final = 1 / 8
#: The room follows what the machine has, so often.
_ADAPTS_S: Final = 1.0
#: How often a stop tries again to move what somebody uses.
_ROUNDS_AT_STOP: Final = 3


class ProbationEnds:
    """Ends the probation of the blocks of one pool."""

    def __init__(
        self,
        pool: Pool,
        reclaim: Reclaim,
        successors: Successors,
        pressure: Callable[[], float] = memory_pressure,
    ) -> None:
        """*pressure* returns for which share of the time something waits for memory."""
        self._pool = pool
        self._pressure = pressure
        self._adapted_s = -math.inf
        #: None: nothing is in memory, and nothing comes.
        self._probation: Final = pool.open.probation
        self._reclaim = reclaim
        self._successors = successors
        self.outgrown: Final = Outgrown(pool)
        self.moves: Final = Moves(pool, self.outgrown, successors)
        #: Blocks that are still to be looked at, before the walk begins anew.
        self._left: list[InodeNo] = []
        #: Blocks that were evicted from memory.
        self.dropped = 0

    def run_due(self, now_s: float) -> None:
        """Let what is proven move, and keep room for drafts. Raises NoSpace, OSError."""
        if self._probation is not None:
            self._probation.count_drafts()
            if now_s - self._adapted_s >= _ADAPTS_S:
                self._adapted_s = now_s
                self._probation.room.adapt(self._pressure(), self._probation.memory.held_bytes)
            self._prove(self._probation.memory)
            self._make_room(self._probation)
            self.moves.run_due(now_s)

    def _prove(self, memory: MemoryFiles) -> None:
        """Look at some blocks, and order the moves of those that are proven."""
        heat = self._pool.rules.heat
        touches = heat.touches
        # With a budget the gate alone decides what is worth a write (gate.py).
        by_use = not self._pool.settings.write_budget_bytes
        if not self._left:
            self._left = memory.inos()
            self._left.reverse()  # those that came first are looked at first
        looks, self._left = self._left[-_LOOKS_A_TICK:], self._left[:-_LOOKS_A_TICK]
        for ino in looks:
            proven = by_use and touches(ino) >= _PROVEN_TOUCHES
            if (proven or heat.held_as(ino, Rank.RETAINED)) and ino in memory:
                self.moves.order(ino)

    def _make_room(self, probation: Probation) -> None:
        """Evict what came first, or move it, until enough is free for the next drafts."""
        wanted_bytes = int(_FREE_SHARE * probation.room.size_bytes) - probation.free_bytes
        if wanted_bytes <= 0:
            return
        going: list[InodeNo] = []
        for ino in probation.memory.inos(CALL_MAX):
            if wanted_bytes <= 0:
                break
            if ino in self.moves or ino in self._pool.open.inodes:
                continue
            if not self._pool.index.knows(ino):  # its file goes in a moment
                wanted_bytes -= probation.memory.bytes_of(ino)
                continue
            found = look_at(self._pool, ino)
            if found.record is None or not probation.room.most_bytes:
                self.moves.order(ino)
            elif not found.used:
                going.append(ino)
                wanted_bytes -= found.record.allocated_bytes
        self._evict(going)

    def _evict(self, inos: list[InodeNo]) -> None:
        blocks, _ = self._reclaim.evict_these(inos, open_too=False, reason=Reason.SPACE)
        self.dropped += blocks

    def describe(self) -> dict[str, int]:
        """Return what is in memory and may be, in blocks and bytes, and what came and left."""
        probation = self._probation
        return {
            "blocks": len(probation.memory) if probation else 0,
            "bytes": probation.memory.held_bytes if probation else 0,
            "room_bytes": probation.room.size_bytes if probation else 0,
            "stored": probation.taken if probation else 0,
            "refused": probation.refused if probation else 0,
            "moved": sum(each.moved for each in (self.moves, self.outgrown, self._successors)),
            "moved_bytes": self.moves.written_bytes + self.outgrown.moved_bytes,
            "dropped": self.dropped,
        }

    def close(self) -> None:
        """Leave nothing in memory that can go; the pool stops, and serves no requests.

        Raises NoSpace, OSError.
        """
        if self._probation is None:
            return
        memory, pool = self._probation.memory, self._pool
        inos = memory.inos()
        for at in range(0, len(inos), CALL_MAX):
            self._evict(inos[at : at + CALL_MAX])
        pool.background.drain()
        for ino in memory.inos():
            self.moves.order(ino)
        for _ in range(len(memory) + _ROUNDS_AT_STOP):  # each may let the next one wait
            if not len(self.moves):
                break
            self.moves.run_due(math.inf)
            pool.background.drain()
