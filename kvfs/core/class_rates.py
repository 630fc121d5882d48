"""How many hits a block of each class brings while a pool keeps it. Pure.

Counted are returns of names that come within a block's stay in the pool. A class has a rate: blocks
that came back, of all. A block that comes back early needs its room for a part of a stay only, and
counts as that part of a block (Beckmann et al., "LHD: Improving Cache Hit Rate by Maximizing Hit
Density", NSDI 2018). Followed are the names with a low hash, in an array of bounded size.
"""

from typing import Final

import numpy as np

#: Slots of names that are followed, of 8 bytes: a MiB, eight for each block of a pool of 16,384. Of
#: a larger pool a sample is followed.
_SLOTS: Final = 1 << 17
_SLOTS_A_BLOCK: Final = 8
#: A slot: 22 bits of the name, 10 bits of its class, 32 bits of when it was asked for.
_CLASS_BITS: Final = 10
CLASSES: Final = 1 << _CLASS_BITS
_CLASS_MASK: Final = CLASSES - 1
_NAME_BITS: Final = 22
_WHEN_BITS: Final = 32
_WHEN: Final = (1 << _WHEN_BITS) - 1
#: The share of its stay in which a block must come back to count: some stay shorter than the mean.
_OF_STAY: Final = 0.7
#: What is taken for the rate of a class that was not seen: so many came back, of so many.
_BACK_BEFORE, _SEEN_BEFORE = 1.0, 2.0
#: The counts are scaled so many times in their half-life.
_FADINGS: Final = 16


class ClassRates:
    """The rates of a pool of *blocks* blocks. Half of what is known fades in a stay."""

    def __init__(self, blocks: int) -> None:
        wanted = _SLOTS_A_BLOCK * max(1, blocks)
        #: Names with none of these bits are followed.
        self.sample_bits = (1 << max(0, (wanted - 1) // _SLOTS).bit_length()) - 1
        slots = min(_SLOTS, 1 << wanted.bit_length())
        self._slots = np.zeros(slots, np.uint64).data
        self._shift = self.sample_bits.bit_length()
        self._seen = [0.0] * CLASSES
        self._back = [0.0] * CLASSES
        self._horizon = 1.0
        self._scaled_at = 0

    @property
    def size_bytes(self) -> int:
        """The memory of the names that are followed."""
        return self._slots.nbytes

    def of(self, kind: int) -> float:
        """Return how many hits a block of class *kind* brings in a stay."""
        return (self._back[kind] + _BACK_BEFORE) / (self._seen[kind] + _SEEN_BEFORE)

    def use(self, name_hash: int, kind: int, now: int) -> None:
        """A block of the sample was asked for, and belongs to class *kind*; *now* in accesses."""
        slots, seen = self._slots, self._seen
        at = (name_hash >> self._shift) & len(slots) - 1
        name = name_hash >> 32 - _NAME_BITS
        slot = slots[at]
        if slot and slot >> _CLASS_BITS + _WHEN_BITS == name:
            age = now - slot & _WHEN
            if age < self._horizon:
                former = slot >> _WHEN_BITS & _CLASS_MASK
                self._back[former] += 1
                seen[former] = max(0.0, seen[former] - 1 + age / self._horizon)
        slots[at] = (name << _CLASS_BITS | kind) << _WHEN_BITS | now & _WHEN
        seen[kind] += 1

    def fade(self, now: int, stay: float) -> None:
        """Let what is old fade; *stay*: for how many accesses the pool keeps an unused block."""
        self._horizon = max(1.0, _OF_STAY * stay)
        passed = now - self._scaled_at
        if passed * _FADINGS > stay:
            kept = 0.5 ** (passed / stay)
            self._seen = [count * kept for count in self._seen]
            self._back = [count * kept for count in self._back]
            self._scaled_at = now
