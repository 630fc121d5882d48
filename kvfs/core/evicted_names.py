"""When names were evicted, for a bounded number of them: tells how soon each was asked for again.

A hash table without chains: each name has one slot, and a later name overwrites an earlier one. A
slot has 32 bits of the name's hash and 32 bits of time.
"""

from typing import Final

import numpy as np

_TICKS_PER_S: Final = 16
_MASK: Final = (1 << 32) - 1


class EvictedNames:
    """The times of the last evictions, by name."""

    def __init__(self, names_max: int) -> None:
        """Remember up to *names_max* names, a power of two, of 8 bytes each."""
        assert names_max & names_max - 1 == 0, "a slot is chosen by the low bits"
        # The kernel allocates the memory of a slot when it is first used.
        self._slots = np.zeros(names_max, np.uint64).data

    def note(self, name_hash: int, now_s: float) -> None:
        """Note that the name with this 32-bit hash was evicted at *now_s* (monotonic clock)."""
        self._slots[name_hash & len(self._slots) - 1] = name_hash << 32 | _ticks(now_s)

    def __contains__(self, name_hash: int) -> bool:
        held = self._slots[name_hash & len(self._slots) - 1]
        return bool(held) and held >> 32 == name_hash

    def take(self, name_hash: int, now_s: float) -> float | None:
        """Return how long ago (s) the name was evicted, and forget it; None if that is unknown."""
        if name_hash not in self:
            return None
        slot = name_hash & len(self._slots) - 1
        held = self._slots[slot]
        self._slots[slot] = 0
        return (_ticks(now_s) - held & _MASK) / _TICKS_PER_S


def _ticks(now_s: float) -> int:
    """Return the time in ticks, in 32 bits; never 0, which means an empty slot."""
    return int(now_s * _TICKS_PER_S) + 1 & _MASK or 1
