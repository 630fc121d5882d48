"""Which order of eviction gives more hits: both are tried on a sample of the names. Pure.

Two miniature caches see every use of a small part of all names, chosen by their hash, and hold that
part of the pool's blocks (Waldspurger et al., "Cache Modeling and Optimization using Miniature
Simulations", ATC 2017). One evicts the least recently used block. The other evicts blocks used
once before all others, and counts a block that comes back soon after its eviction as used again.
"""

from collections import OrderedDict
from typing import Final

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
    """Compares the recent hits of both orders."""

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
