"""The gate of a mount: what was stored and used is judged, burst by burst (core/admission.py).

A burst of the heat, about a second, has what all clients asked for. It is cut before each name that
is known and follows one that is not: there the next prompt begins, whose head is known. What is new
and worth it moves from memory to its drive. What is new and not worth it is the next to go, in
memory and on the drive: a block that is on its drive already has cost its write.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from kvfs.core.admission import MountedGate
from kvfs.core.types import InodeNo
from kvfs.engine.blocks.moves import Moves
from kvfs.pool.pool import Pool
from kvfs.storage.heat import BURST_S


class Gate:
    """Judges the blocks of one pool whose policy is the gate; else does nothing."""

    def __init__(self, pool: Pool, moves: Moves) -> None:
        self._pool = pool
        self._moves = moves
        policy = pool.rules.heat.policy
        self._policy: Final = policy if isinstance(policy, MountedGate) else None
        self._judged_stamp = pool.rules.heat.stamp
        self._judged_s = -math.inf
        #: New blocks that were worth a write, and that were not.
        self.admitted = self.turned_away = 0

    def run_due(self, now_s: float) -> None:
        """Judge the bursts that have ended since the last time; some 10 us for each block."""
        heat = self._pool.rules.heat
        if self._policy is None or now_s - self._judged_s < BURST_S:
            return
        self._policy.resize(len(heat))
        used = heat.used_in_bursts(self._judged_stamp)
        self._judged_s, self._judged_stamp = now_s, max(used.end, self._judged_stamp)
        before = [touches - 1 for touches in used.touches]
        known = [
            bool(had) or self._policy.knows(name)
            for had, name in zip(before, used.names, strict=True)
        ]
        for first, end in pairwise((*_starts(known), len(known))):
            verdicts = self._policy.judge(used.names[first:end], before[first:end])
            self._carry_out(used.inos[first:end], before[first:end], verdicts)

    def _carry_out(
        self, inos: Sequence[InodeNo], before: Sequence[int], verdicts: Sequence[bool]
    ) -> None:
        pool = self._pool
        for ino, had, worthy in zip(inos, before, verdicts, strict=True):
            if had:
                continue
            self.admitted += worthy
            self.turned_away += not worthy
            if not worthy:
                pool.rules.heat.demote(ino)
            elif pool.open.has_in_memory(ino):
                self._moves.order(ino)

    def describe(self) -> dict[str, float]:
        """Return what a block must be worth now (hits in its stay), and how many were judged.

        Also what is known of classes, which outlives a restart.
        """
        classes, hits_a_block = (0, 0.0) if self._policy is None else self._policy.known
        return {
            "threshold": self._policy.threshold if self._policy is not None else 0.0,
            "admitted": self.admitted,
            "turned_away": self.turned_away,
            "classes": classes,
            "hits_a_block": round(hits_a_block, 4),
        }


def _starts(known: Sequence[bool]) -> Iterator[int]:
    """Yield where prompts begin: at a known name after one that is not, and at the first one."""
    unknown_before = True
    for at, is_known in enumerate(known):
        if at == 0 or (is_known and unknown_before):
            yield at
        unknown_before = not is_known
