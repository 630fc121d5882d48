"""The gate of a mount: what was stored and used is judged, burst by burst (core/admission.py).

A burst of the heat, about a second, has what all clients asked for. It is cut before each name that
is known and follows one that is not: there the next prompt begins, whose head is known. What is new
and worth it moves from memory to its drive. What is new and not worth it is the next to go, in
memory and on the drive: a block that is on its drive already has cost its write.

With a budget of writes (core/write_budget.py) what is written to the drives is counted here, by the
counters of their kernel, or what moved there from memory, where there is none. A second use is then
no reason to write a block either, unless it is worth it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from kvfs.core.admission import MountedGate
from kvfs.core.types import InodeNo
from kvfs.core.write_budget import HOURS, WriteBudget
from kvfs.engine.blocks.moves import Moves
from kvfs.pool.pool_parts import OpenParts
from kvfs.storage.heat import BURST_S, Heat


class Gate:
    """Judges the blocks of one pool whose policy is the gate; else does nothing."""

    def __init__(
        self,
        heat: Heat,
        opened: OpenParts,
        moves: Moves,
        wear: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """*wear* returns ``written_bytes`` since the start and ``endurance_left_bytes``.

        None, or no such key: it is not known.
        """
        self._heat = heat
        self._open = opened
        self._wear = wear
        self._moves = moves
        policy = heat.policy
        self._policy: Final = policy if isinstance(policy, MountedGate) else None
        self._budget: Final = WriteBudget(0) if self._policy is None else self._policy.budget
        self._judged_stamp = heat.stamp
        self._judged_s = -math.inf
        #: New blocks that were worth a write, and that were not.
        self.admitted = self.turned_away = 0

    def run_due(self, now_s: float) -> None:
        """Judge the bursts that have ended since the last time; some 10 us for each block."""
        heat = self._heat
        if self._policy is None or now_s - self._judged_s < BURST_S:
            return
        self._budget.count(self._written_bytes(), now_s)
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

    def _written_bytes(self) -> int:
        """Return what was written to the drives since the start."""
        told: int | None = self._wear().get("written_bytes")
        return self._moves.written_bytes if told is None else told

    def _carry_out(
        self, inos: Sequence[InodeNo], before: Sequence[int], verdicts: Sequence[bool]
    ) -> None:
        for ino, had, worthy in zip(inos, before, verdicts, strict=True):
            if had:
                if self.has_budget and worthy and self._open.has_in_memory(ino):
                    self._moves.order(ino)
                continue
            self.admitted += worthy
            self.turned_away += not worthy
            if not worthy:
                self._heat.demote(ino)
            elif self._open.has_in_memory(ino):
                self._moves.order(ino)

    @property
    def has_budget(self) -> bool:
        """Whether writes have a bound, so that the price alone decides of them."""
        return self._budget.a_day_bytes > 0

    def _describe_budget(self) -> dict[str, float | None]:
        """Return what of the budget was used, and how many days the drives last at this rate."""
        budget = self._budget
        used = {"used_hour": budget.used_share(1), "used_day": budget.used_share(HOURS)}
        lasts_days = None
        if used["used_day"] and (left := self._wear().get("endurance_left_bytes")) is not None:
            lasts_days = round(left / (used["used_day"] * budget.a_day_bytes), 1)
        return {
            "budget_bytes": budget.a_day_bytes,
            "price": budget.price,
            **{span: None if share is None else round(share, 4) for span, share in used.items()},
            "lasts_days": lasts_days,
        }

    def describe(self) -> dict[str, float | None]:
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
            **self._describe_budget(),
        }


def _starts(known: Sequence[bool]) -> Iterator[int]:
    """Yield where prompts begin: at a known name after one that is not, and at the first one."""
    unknown_before = True
    for at, is_known in enumerate(known):
        if at == 0 or (is_known and unknown_before):
            yield at
        unknown_before = not is_known
