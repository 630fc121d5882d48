"""How blocks come back: after how many bytes, and at which age.

Misses, loads and evictions together tell what a pool of another size would have (``ReuseWatch``):
reuse distances, of a sample, what the hit rate would be. The reuse
distance of a reference is how many bytes of other blocks were used since the block was used last. A
larger pool with LRU eviction still has the block (Mattson et al., 1970). It is enough to follow the
names with a low hash (SHARDS: Waldspurger et al., FAST 2015): among a share R of all names, each
distance is R times the true one. R is lowered when too many names are followed.

Each followed name has a position, in the order of last use. A distance is the sum of the sizes
behind a position; partial sums over _PART positions make it two short sums.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Final, NamedTuple

from kvfs.core.checksum import crc32c
from kvfs.core.evicted import HASHES, EvictedNames, TierBehind
from kvfs.core.types import InodeNo, InodeRecord

#: Positions in one partial sum.
_PART_BITS: Final = 7
_PART: Final = 1 << _PART_BITS
#: Buckets of distances per doubling of bytes.
_STEPS: Final = 16
_OCTAVES: Final = 60
#: This part of a full sample is kept, unless it is enough to drop useless old names.
_KEPT: Final = 0.75
#: A name is forgotten when its distance exceeds this many times the capacity.
FARTHEST: Final = 5
#: After this many references all counts are halved.
_HALVED_AFTER: Final = 1 << 22
#: Followed names: 0.7 MiB at worst. On a recorded trace predictions are within a percentage point
#: of real pools (tests/core/test_reuse_distance.py).
_FOLLOWED_MAX: Final = 4096
#: Most loads of followed blocks between two ticks; beyond it the oldest are left out.
_LOADS_MAX: Final = 1024
#: Sizes of the pool on the curve, as parts and multiples of its own.
FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Spreads checksums of names that differ only at the end over all values (Knuth).
_MULTIPLIER: Final = 0x9E3779B1
_KEY_MASK: Final = (1 << 32) - 1
_SIZE_SHIFT: Final = 32
#: A block that is not followed.
NOT_FOLLOWED: Final = -1


class Point(NamedTuple):
    """The hit rate of a pool of *size_bytes*."""

    size_bytes: int
    hit_rate: float


class ReuseDistances:
    """A histogram of reuse distances, in bytes, of the names with a low hash."""

    def __init__(self, names_max: int, capacity_bytes: int) -> None:
        """Follow at most *names_max* names, for pools of up to FARTHEST * *capacity_bytes*."""
        self._names_max = names_max
        self._farthest_bytes = FARTHEST * capacity_bytes
        self._below = HASHES
        self._weight = 1.0
        self._parts = -(-2 * names_max // _PART) + 1
        #: Position by name (its hash), the least recently used first.
        self._at: dict[int, int] = {}
        #: Bytes by position, and their sums over _PART positions.
        self._sizes: list[int] = []
        self._sums: list[int] = []
        self._next = 0
        self._clear_positions()
        #: Weighted references by distance; ``_cold`` counts misses of names that are not known.
        self._counts = [0.0] * (_STEPS * _OCTAVES)
        self._cold = 0.0
        #: Weight of hits on blocks stored before the server's start: their distance is unknown.
        self._left_out = 0.0
        self._references = 0

    def __len__(self) -> int:
        return len(self._at)

    @property
    def rate(self) -> float:
        """The share of all names that is followed."""
        return self._below / HASHES

    def follows(self, name_hash: int) -> bool:
        """Whether names with this hash are followed."""
        return name_hash < self._below

    def load(self, name_hash: int, size_bytes: int, times: int = 1) -> None:
        """A client asked *times* for a block of *size_bytes* and found it."""
        if name_hash >= self._below:
            return
        weight = self._weight
        at = self._at.pop(name_hash, None)
        if at is None:
            self._left_out += weight
        else:
            self._counts[_bucket(int(self._distance(at) * weight) + size_bytes)] += weight
        if times > 1:
            self._counts[_bucket(size_bytes)] += weight * (times - 1)
        self._use(name_hash, at, size_bytes)

    def miss(self, name_hash: int) -> None:
        """A client asked for a name and found nothing: a larger pool may have it."""
        if name_hash >= self._below:
            return
        weight = self._weight
        at = self._at.pop(name_hash, None)
        if at is None:
            self._cold += weight
            return
        size_bytes = self._sizes[at]
        self._counts[_bucket(int(self._distance(at) * weight) + size_bytes)] += weight
        self._use(name_hash, at, size_bytes)

    def store(self, name_hash: int, size_bytes: int) -> None:
        """A block was stored: that is a use, but not a reference."""
        if name_hash >= self._below:
            return
        at = self._at.pop(name_hash, None)
        last = self._next
        if at is not None or last >= len(self._sizes) or len(self._at) >= self._names_max:
            self._use(name_hash, at, size_bytes)
            return
        # A new name, as ``_put`` enters it: every store comes here.
        self._next = last + 1
        self._at[name_hash] = last
        self._sizes[last] = size_bytes
        self._sums[last >> _PART_BITS] += size_bytes

    def forget(self, name_hash: int) -> None:
        """A client removed the name: no pool would have it."""
        at = self._at.pop(name_hash, None)
        if at is not None:
            self._remove(at)

    def count(self, references: int) -> None:
        """Count *references* to all names, followed or not."""
        self._references += references
        if self._references > _HALVED_AFTER:
            self._references //= 2
            self._cold /= 2
            self._left_out /= 2
            self._counts = [count / 2 for count in self._counts]

    def curve(self, sizes_bytes: Iterable[int]) -> list[Point]:
        """Return the hit rate of pools of *sizes_bytes*; [] before the first reference."""
        sampled = self._cold + sum(self._counts)
        total = self._references - self._left_out
        if not sampled or total <= 0:
            return []
        # A few names may have many of the references. If the sample has too many or too few
        # references, the difference is taken from the shortest distances (the paper's SHARDS-adj).
        missing = total - sampled
        points = []
        for size_bytes in sizes_bytes:
            hits = missing + self._within(size_bytes)
            points.append(Point(size_bytes, min(1.0, max(0.0, hits / total))))
        return points

    def _within(self, size_bytes: int) -> float:
        """Return the weight of references with a distance of at most *size_bytes*."""
        if size_bytes < 1:
            return 0.0
        whole, part = divmod(_STEPS * math.log2(size_bytes), 1)
        last = min(int(whole), len(self._counts) - 1)
        return sum(self._counts[:last]) + part * self._counts[last]

    def _distance(self, at: int) -> int:
        """Return the bytes of the followed names that were used after the one at position *at*."""
        part = at >> _PART_BITS
        return sum(self._sums[part + 1 :]) + sum(self._sizes[at + 1 : (part + 1) << _PART_BITS])

    def _use(self, name_hash: int, at: int | None, size_bytes: int) -> None:
        """Make a name the most recently used one; *at*: its position so far, None: it is new."""
        if at is not None:
            self._remove(at)
        if self._next >= len(self._sizes):
            self._close_up()
        self._put(name_hash, size_bytes)
        if len(self._at) > self._names_max:
            self._shrink()

    def _put(self, name_hash: int, size_bytes: int) -> None:
        at = self._next
        self._next = at + 1
        self._at[name_hash] = at
        self._sizes[at] = size_bytes
        self._sums[at >> _PART_BITS] += size_bytes

    def _remove(self, at: int) -> None:
        self._sums[at >> _PART_BITS] -= self._sizes[at]
        self._sizes[at] = 0

    def _close_up(self) -> None:
        """Move the names to the first positions, in the same order."""
        kept = [(name_hash, self._sizes[at]) for name_hash, at in self._at.items()]
        self._clear_positions()
        for name_hash, size_bytes in kept:
            self._put(name_hash, size_bytes)

    def _clear_positions(self) -> None:
        self._at = {}
        self._sizes = [0] * (self._parts << _PART_BITS)
        self._sums = [0] * self._parts
        self._next = 0

    def _shrink(self) -> None:
        """Make the sample smaller: drop names that are too old, or lower the rate."""
        while len(self._at) > self._names_max:
            oldest = next(iter(self._at))
            far = self._distance(self._at[oldest]) * self._weight > self._farthest_bytes
            if far or self._below == 1:
                self.forget(oldest)
                continue
            self._below = max(1, int(self._below * _KEPT))
            self._weight = HASHES / self._below
            for name_hash in [each for each in self._at if each >= self._below]:
                self.forget(name_hash)


def _bucket(distance_bytes: int) -> int:
    """Return the bucket of *distance_bytes*. A pool of exactly that size has the block."""
    return min(int(_STEPS * math.log2(max(1, distance_bytes - 1))), _STEPS * _OCTAVES - 1)


#: Buckets per doubling of the age. All ages below _YOUNGEST_S share the first bucket.
_AGE_STEPS: Final = 4
_YOUNGEST_S: Final = 2**-6
#: Enough for ages up to some 500 years.
_AGE_BUCKETS: Final = _AGE_STEPS * 40
#: After this many ages all counts are halved, so that the quantiles follow the current load.
_AGES_HALVED_AFTER: Final = 1 << 16
#: The median, and the range in which 80 % of the ages lie.
_QUANTILES: Final = (("p10_s", 0.1), ("p50_s", 0.5), ("p90_s", 0.9))


class AgeHistogram:
    """Counts of ages in seconds. Its quantiles are right to within a tenth."""

    def __init__(self) -> None:
        self._counts = [0] * _AGE_BUCKETS
        self._total = 0

    def add(self, age_s: float) -> None:
        """Count one age. A negative one (the clock was set back) counts as 0."""
        bucket = int(_AGE_STEPS * math.log2(max(age_s, _YOUNGEST_S) / _YOUNGEST_S))
        self._counts[min(bucket, _AGE_BUCKETS - 1)] += 1
        self._total += 1
        if self._total >= _AGES_HALVED_AFTER:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)

    def quantile_s(self, share: float) -> float | None:
        """Return the age (s) that *share* of all ages do not exceed; None without ages."""
        if not self._total:
            return None
        wanted = max(1, math.ceil(share * self._total))
        bucket = next(at for at, sum_ in enumerate(accumulate(self._counts)) if sum_ >= wanted)
        # The middle of the bucket, in doublings.
        return _YOUNGEST_S * 2 ** ((bucket + 0.5) / _AGE_STEPS)

    def quantiles_s(self) -> dict[str, float | None]:
        """Return the quantiles (s) that `kvfs status` shows, under the names it uses."""
        found = {name: self.quantile_s(share) for name, share in _QUANTILES}
        return {name: None if age_s is None else round(age_s, 3) for name, age_s in found.items()}


def key_of(parent: InodeNo, name: bytes) -> int:
    """Return 32 bits that stand for *name* in directory *parent*."""
    return crc32c(name, parent & _KEY_MASK) * _MULTIPLIER & _KEY_MASK


class ReuseWatch:
    """Reuse distances, ages at eviction, and misses after it. Cheap where a request waits.

    All figures are about names, each known by 32 bits of a checksum. What is kept is bounded:
    followed names, the names that were evicted last, and the loads since the last ``count_loads``.
    """

    def __init__(self, capacity_bytes: int, evicted: EvictedNames) -> None:
        """*evicted* may have names of the last server."""
        self._distances = ReuseDistances(_FOLLOWED_MAX, capacity_bytes)
        self._evicted = evicted
        self._behind = TierBehind()
        self._ages = AgeHistogram()
        self._returns = AgeHistogram()
        self._loads: deque[int] = deque(maxlen=_LOADS_MAX)
        #: Notes a load of a followed block; takes what ``followed`` returned.
        self.loaded = self._loads.append

    def followed(self, record: InodeRecord) -> int:
        """Return what to pass to ``loaded`` for the block with *record*, or NOT_FOLLOWED."""
        key = key_of(record.parent, record.name)
        if not self._distances.follows(key):
            return NOT_FOLLOWED
        return record.allocated_bytes << _SIZE_SHIFT | key

    def missed(self, parent: InodeNo, name: bytes, now_s: float) -> None:
        """A client asked for *name* and found nothing."""
        key = key_of(parent, name)
        self._distances.miss(key)
        found = self._evicted.pop(key, now_s)
        if found is not None:
            self._returns.add(found.away_s)
            self._behind.missed(found)

    def stored(self, record: InodeRecord, monotonic_s: Callable[[], float]) -> None:
        """A block was stored."""
        key = key_of(record.parent, record.name)
        self._distances.store(key, record.allocated_bytes)
        if key in self._evicted and (found := self._evicted.pop(key, monotonic_s())) is not None:
            self._behind.stored(found)

    def removed(self, record: InodeRecord) -> None:
        """A client removed a block."""
        self._distances.forget(key_of(record.parent, record.name))

    def evicted(self, record: InodeRecord, age_s: float, now_s: float) -> None:
        """A block was evicted *age_s* after its last use."""
        self._ages.add(age_s)
        key = key_of(record.parent, record.name)
        self._evicted.remember(key, record.allocated_bytes, now_s)
        self._behind.evicted(record.allocated_bytes)

    def was_evicted(self, parent: InodeNo, name: bytes) -> bool:
        """Whether *name* was evicted lately, and not missed since."""
        return key_of(parent, name) in self._evicted

    def count_loads(self) -> None:
        """Process the loads since the last tick."""
        if self._loads:
            loads = Counter(self._loads)
            self._loads.clear()
            for load, times in loads.items():
                self._distances.load(load & _KEY_MASK, load >> _SIZE_SHIFT, times)

    def count(self, references: int) -> None:
        """Note that clients asked for *references* more blocks, followed or not."""
        self._distances.count(references)

    def shown_behind(self, asked: int, uptime_s: float) -> dict[str, Any]:
        """Return what a tier behind this one would have had, of *asked* blocks in *uptime_s*."""
        shown = self._behind.shown(asked, uptime_s)
        return {"names_share": round(self._evicted.share, 6), **shown}

    def shown(self, capacity_bytes: int, held_bytes: int) -> dict[str, Any]:
        """Return the figures for `kvfs status`; *held_bytes* of the capacity are for blocks."""
        points = self._distances.curve(int(held_bytes * factor) for factor in FACTORS)
        curve = [
            {
                "factor": factor,
                "capacity_bytes": int(capacity_bytes * factor),
                "hit_rate": round(point.hit_rate, 4),
            }
            for factor, point in zip(FACTORS, points, strict=bool(points))
        ]
        return {
            "age_at_eviction": self._ages.quantiles_s(),
            "missed_after_eviction": self._returns.quantiles_s(),
            "curve": curve,
            "curve_names": len(self._distances),
            "curve_share": round(self._distances.rate, 6),
        }
