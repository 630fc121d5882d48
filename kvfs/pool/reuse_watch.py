"""How blocks are used again: reuse distances, ages at eviction, and misses after it.

All figures are about names, each known by 32 bits of a checksum. What is kept is bounded: followed
names, the names that were evicted last, and the loads since the last tick.
"""

from collections import Counter, deque
from typing import Any, Final

from kvfs.core.age_histogram import AgeHistogram
from kvfs.core.checksum import crc32c
from kvfs.core.evicted_names import EvictedNames
from kvfs.core.reuse_distance import ReuseDistances
from kvfs.core.types import InodeNo, InodeRecord

#: Followed names: 0.7 MiB at worst. On a recorded trace predictions are within a percentage point
#: of real pools (tests/core/test_reuse_distance.py).
_FOLLOWED_MAX: Final = 4096
#: Evicted names that are remembered: 8 bytes each, 512 KiB in all.
_EVICTED_MAX: Final = 1 << 16
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


def key_of(parent: InodeNo, name: bytes) -> int:
    """Return 32 bits that stand for *name* in directory *parent*."""
    return crc32c(name, parent & _KEY_MASK) * _MULTIPLIER & _KEY_MASK


class ReuseWatch:
    """Watches one pool. Cheap where a request waits; the rest is done in ``tick``."""

    def __init__(self, capacity_bytes: int) -> None:
        self._distances = ReuseDistances(_FOLLOWED_MAX, capacity_bytes)
        self._evicted = EvictedNames(_EVICTED_MAX)
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
        away_s = self._evicted.take(key, now_s)
        if away_s is not None:
            self._returns.add(away_s)

    def stored(self, record: InodeRecord) -> None:
        """A block was stored."""
        self._distances.store(key_of(record.parent, record.name), record.allocated_bytes)

    def removed(self, record: InodeRecord) -> None:
        """A client removed a block."""
        self._distances.forget(key_of(record.parent, record.name))

    def evicted(self, record: InodeRecord, age_s: float, now_s: float) -> None:
        """A block was evicted *age_s* after its last use."""
        self._ages.add(age_s)
        self._evicted.note(key_of(record.parent, record.name), now_s)

    def was_evicted(self, parent: InodeNo, name: bytes) -> bool:
        """Whether *name* was evicted lately, and not missed since."""
        return key_of(parent, name) in self._evicted

    def tick(self) -> None:
        """Process the loads since the last tick."""
        if self._loads:
            loads = Counter(self._loads)
            self._loads.clear()
            for load, times in loads.items():
                self._distances.load(load & _KEY_MASK, load >> _SIZE_SHIFT, times)

    def count(self, references: int) -> None:
        """Note that clients asked for *references* more blocks, followed or not."""
        self._distances.count(references)

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
