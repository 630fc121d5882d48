"""Which price of a written byte pays: miniature caches try several on a sample of the names. Pure.

Each cache evicts the least recently used block, and takes a block only if it is worth at least the
cache's threshold. They see every use of a small part of all names, chosen by their hash, and hold
that part of the pool's blocks (Waldspurger et al., "Cache Modeling and Optimization using Miniature
Simulations", ATC 2017).
"""

from collections import OrderedDict
from typing import Final

#: What a block must be worth, in hits while the pool keeps it. The first takes all: plain LRU.
THRESHOLDS: Final = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
#: A miniature cache holds at least this many blocks, if the pool does, and less than twice as many.
_HELD_MIN: Final = 1024
#: Half-life of a hit, in uses per block of a miniature cache: a change of load shows in time.
_HALF_LIFE: Final = 4
#: Another threshold must be better by this many hits to be followed.
_LEAD_MIN: Final = 1.0


class PriceTrials:
    """Finds the threshold that gives the most hits, less the price of its writes."""

    def __init__(self, blocks: int) -> None:
        """The pool holds *blocks* blocks."""
        shift = max(0, (blocks // _HELD_MIN).bit_length() - 1)
        #: Names with none of these bits are the sample.
        self.sample_bits = (1 << shift) - 1
        #: What a block must be worth now.
        self.threshold = THRESHOLDS[0]
        self._held = max(1, blocks >> shift)
        self._caches = tuple(OrderedDict[int, None]() for _ in THRESHOLDS)
        self._gains = [0.0] * len(THRESHOLDS)

    def use(self, name_hash: int, worth: float, price: float) -> None:
        """A block of the sample was stored or used.

        *worth*: the hits that it is expected to bring. *price*: the hits that a write must bring.
        """
        kept = 0.5 ** (1 / (_HALF_LIFE * self._held))
        gains = self._gains
        for number, (threshold, cache) in enumerate(zip(THRESHOLDS, self._caches, strict=True)):
            gain = gains[number] * kept
            if name_hash in cache:
                cache.move_to_end(name_hash)
                gain += 1
            elif worth >= threshold or len(cache) < self._held:
                cache[name_hash] = None
                gain -= price
                if len(cache) > self._held:
                    cache.popitem(last=False)
            gains[number] = gain
        best = max(range(len(gains)), key=gains.__getitem__)
        now = THRESHOLDS.index(self.threshold)
        if gains[best] - gains[now] > _LEAD_MIN:
            self.threshold = THRESHOLDS[best]
