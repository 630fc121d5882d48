"""What the order of eviction learns from: evicted names that come back, and caches on trial. Pure.

A ghost is the name of an evicted block. If it is stored again, it was evicted too early. Two
miniature caches try on a sample of the names which order of eviction gives more hits.
"""

from collections import OrderedDict
from typing import Final

import numpy as np

_SLOTS_MIN: Final = 1 << 10
#: A slot: 32 bits of the name, 31 bits of when it was evicted, 1 bit: touched more than once.
_NAME_SHIFT: Final = 32
_WHEN_MASK: Final = (1 << 31) - 1
_FREQUENT: Final = 1


#: Slots in which a name may be. With one, other names overwrote so many ghosts that most long
#: chains came back with a hole, and a chain with a hole is no prefix.
_PLACES: Final = 8


class Ghosts:
    """Two histories, of blocks used once and of those used more often, each with its own clock.

    A hash table of buckets: in a full one the ghost that has least to live gives way. A ghost takes
    8 bytes.
    """

    def __init__(self, slots_a_life: float = 4) -> None:
        """The table grows to *slots_a_life* times the ghosts that live, or up to twice that."""
        self._slots_a_life = slots_a_life
        self._slots = np.zeros(_SLOTS_MIN, np.uint64).data
        #: Evictions so far, of blocks used once and of the others; 0 is "never".
        self._evictions = [1, 1]
        #: About how many ghosts of each kind are remembered.
        self.counts = [0, 0]

    def remember(self, name_hash: int, *, frequent: bool, lives: tuple[int, int]) -> None:
        """A block was evicted; *lives* as in ``pop``."""
        slots_max = self._slots_a_life * sum(lives)
        if 2 * sum(self.counts) > len(self._slots) and len(self._slots) < slots_max:
            self._widen()
        self._evictions[frequent] += 1
        slot = self._place_for(name_hash, lives)
        if former := self._slots[slot]:
            self._uncount(former)
        when = self._evictions[frequent] & _WHEN_MASK
        self._slots[slot] = name_hash << _NAME_SHIFT | when << 1 | frequent
        self.counts[frequent] += 1

    def pop(self, name_hash: int, lives: tuple[int, int]) -> int | None:
        """Return the kind of this name's ghost, 0 or 1, and forget it; None if there is none.

        A ghost lives for *lives* evictions of its kind.
        """
        slots = self._slots
        for slot in self._bucket(name_hash):
            held = slots[slot]
            if held >> _NAME_SHIFT == name_hash and held:
                slots[slot] = 0
                self._uncount(held)
                kind = held & _FREQUENT
                return kind if self._age(held) < lives[kind] else None
        return None

    def _bucket(self, name_hash: int) -> range:
        first = (name_hash & len(self._slots) // _PLACES - 1) * _PLACES
        return range(first, first + _PLACES)

    def _place_for(self, name_hash: int, lives: tuple[int, int]) -> int:
        """Return the slot of the name, or an empty one, or that of the ghost next to its end."""
        slots = self._slots
        place, least = 0, float("inf")
        for slot in self._bucket(name_hash):
            held = slots[slot]
            if not held or held >> _NAME_SHIFT == name_hash:
                return slot
            left = lives[held & _FREQUENT] - self._age(held)
            if left < least:
                place, least = slot, left
        return place

    def _age(self, held: int) -> int:
        return self._evictions[held & _FREQUENT] - (held >> 1) & _WHEN_MASK

    def _uncount(self, held: int) -> None:
        self.counts[held & _FREQUENT] -= 1

    def _widen(self) -> None:
        """Double the slots: one more bit of each name chooses its bucket."""
        old = np.asarray(self._slots)
        old = old[old != 0]
        buckets = 2 * len(self._slots) // _PLACES
        number = (old >> np.uint64(_NAME_SHIFT)) & np.uint64(buckets - 1)
        order = np.argsort(number, kind="stable")
        old, number = old[order], number[order]
        # A bucket is divided in two, so none has more than it holds.
        place = np.arange(len(old)) - np.searchsorted(number, number)
        slots = np.zeros(buckets * _PLACES, np.uint64)
        slots[number.astype(np.intp) * _PLACES + place] = old
        self._slots = slots.data


#: A miniature cache holds at least this many blocks, if the pool does, and less than twice as many.
_HELD_MIN: Final = 256
#: An evicted name is remembered for this many evictions per block of the pool.
GHOSTS: Final = 4
#: Half-life of a hit, in uses per block of a miniature cache: a change of load shows in time.
_HALF_LIFE: Final = 16
#: The better order must lead by this many hits, per block of a miniature cache, to be followed. A
#: few hits are chance.
_MARGIN: Final = 1 / 32
_MARGIN_MIN: Final = 8
#: All bits: no hash but 0 is in such a sample.
NO_SAMPLE: Final = -1


class ShadowCaches:
    """Compares the recent hits of both orders.

    Two miniature caches see every use of a small part of all names, chosen by their hash, and hold
    that part of the pool's blocks (Waldspurger et al., "Cache Modeling and Optimization using
    Miniature Simulations", ATC 2017). One evicts the least recently used block. The other evicts
    blocks used once before all others, and counts a block that comes back soon after its eviction
    as used again.
    """

    def __init__(self) -> None:
        #: Names with none of these bits are the sample.
        self.sample_bits = NO_SAMPLE
        #: Whether blocks used once should go first.
        self.once_first = False
        self._held = 0
        self._lead = 0.0
        self._clear()

    def resize(self, blocks: int) -> None:
        """Note that the pool is full, and holds *blocks* blocks."""
        shift = max(0, (blocks // _HELD_MIN).bit_length() - 1)
        if self.sample_bits != (1 << shift) - 1:
            self.sample_bits = (1 << shift) - 1
            self._clear()
        self._held = max(1, blocks >> shift)

    def use(self, name_hash: int) -> None:
        """A block of the sample was stored or used."""
        if not self._held:
            return
        self._lead *= 0.5 ** (1 / (_HALF_LIFE * self._held))
        self._lead += self._found_once_first(name_hash) - self._found_by_age(name_hash)
        if abs(self._lead) > max(_MARGIN_MIN, self._held * _MARGIN):
            self.once_first = self._lead > 0

    def _clear(self) -> None:
        self._by_age: OrderedDict[int, None] = OrderedDict()
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def _found_by_age(self, name_hash: int) -> bool:
        held = self._by_age
        found = name_hash in held
        held[name_hash] = None
        held.move_to_end(name_hash)
        while len(held) > self._held:
            held.popitem(last=False)
        return found

    def _found_once_first(self, name_hash: int) -> bool:
        once, again, ghosts = self._once, self._again, self._ghosts
        found = name_hash in again or name_hash in once
        if found or name_hash in ghosts:
            once.pop(name_hash, None)
            ghosts.pop(name_hash, None)
            again[name_hash] = None
            again.move_to_end(name_hash)
        else:
            once[name_hash] = None
        while len(once) + len(again) > self._held:
            # A block that was just stored is not evicted by its own store.
            victims = once if len(once) > (name_hash in once) else again or once
            ghosts[victims.popitem(last=False)[0]] = None
        while len(ghosts) > GHOSTS * self._held:
            ghosts.popitem(last=False)
        return found
