"""Ghosts: names of evicted blocks. If one is stored again, it was evicted too early.

A hash table without chains: each name has one slot, and a later name overwrites an earlier one. A
ghost takes 8 bytes.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_SLOTS_MIN: Final = 1 << 10
#: A slot: 32 bits of the name, 31 bits of when it was evicted, 1 bit: touched more than once.
_NAME_SHIFT: Final = 32
_WHEN_MASK: Final = (1 << 31) - 1
_FREQUENT: Final = 1


class Ghosts:
    """Two histories, of blocks used once and of those used more often, each with its own clock."""

    def __init__(self, slots_a_life: float = 4) -> None:
        """The table grows to *slots_a_life* times the ghosts that live, or up to twice that."""
        self._slots_a_life = slots_a_life
        self._slots = np.zeros(_SLOTS_MIN, np.uint64).data
        #: Evictions so far, of blocks used once and of the others; 0 is "never".
        self._evictions = [1, 1]
        #: About how many ghosts of each kind are remembered.
        self.counts = [0, 0]

    def remember(self, name_hash: int, *, frequent: bool, lives: tuple[int, int]) -> None:
        """A block was evicted; *lives* as in ``take``."""
        slots_max = self._slots_a_life * sum(lives)
        if 2 * sum(self.counts) > len(self._slots) and len(self._slots) < slots_max:
            self._widen()
        self._evictions[frequent] += 1
        slot = name_hash & len(self._slots) - 1
        if former := self._slots[slot]:
            self._uncount(former)
        when = self._evictions[frequent] & _WHEN_MASK
        self._slots[slot] = name_hash << _NAME_SHIFT | when << 1 | frequent
        self.counts[frequent] += 1

    def take(self, name_hash: int, lives: tuple[int, int]) -> int | None:
        """Return the kind of this name's ghost, 0 or 1, and forget it; None if there is none.

        A ghost lives for *lives* evictions of its kind.
        """
        slot = name_hash & len(self._slots) - 1
        held = self._slots[slot]
        if held >> _NAME_SHIFT != name_hash or not held:
            return None
        self._slots[slot] = 0
        self._uncount(held)
        kind = held & _FREQUENT
        age = self._evictions[kind] - (held >> 1) & _WHEN_MASK
        return kind if age < lives[kind] else None

    def _uncount(self, held: int) -> None:
        self.counts[held & _FREQUENT] -= 1

    def _recount(self, slots: NDArray[np.uint64]) -> None:
        frequent = int(np.count_nonzero(slots & np.uint64(_FREQUENT)))
        self.counts = [int(np.count_nonzero(slots)) - frequent, frequent]

    def _widen(self) -> None:
        """Double the slots: one more bit of each name chooses its slot."""
        old = np.asarray(self._slots)
        old = old[old != 0]
        slots = np.zeros(2 * len(self._slots), np.uint64)
        slots[(old >> np.uint64(_NAME_SHIFT)) & np.uint64(len(slots) - 1)] = old
        self._slots = slots.data
        self._recount(slots)
