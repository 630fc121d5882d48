"""Which lookups that found nothing are misses of the cache, and how blocks are used again.

A miss is a client that asks for a block that is not there. But the kernel sends more lookups:

- open(2) with O_CREAT and rename(2) look the name up before they create it. The request that
creates it follows at once.
- A name that the kernel has cached, but kvfs has evicted, is looked up twice: to revalidate it
(fuse_dentry_revalidate in fs/fuse/dir.c), and again.

So a lookup waits for a moment before it counts (``Looks``). Otherwise the kernel does not repeat a
lookup: it caches the answer for ``negative_timeout_s``. Misses, loads and evictions together tell
what a pool of another size would have (``ReuseWatch``).
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Any, Final

from kvfs.core.checksum import crc32c
from kvfs.core.reuse import AgeHistogram, EvictedNames, ReuseDistances
from kvfs.core.types import InodeNo, InodeRecord

#: The longest time between the lookup and the RENAME of one system call, on a machine that is short
#: of CPU. The kernel sends that lookup even if it has cached that the name is missing
#: (fuse_dentry_revalidate in fs/fuse/dir.c), so it is never a client's own, earlier lookup.
RENAME_LOOK_S: Final = 1.0
#: The same for a CREATE, before which the kernel may send no lookup. Then the last one is the
#: client's own; but the client computes the block in between, which takes longer than this.
CREATE_LOOK_S: Final = 0.1
#: Most lookups that wait; for one more the oldest counts at once.
_WAITING_MAX: Final = 4096
#: Most lookups that a tick counts: each may read some index rows, and requests wait meanwhile.
A_TICK: Final = 1024
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
Name = tuple[InodeNo, bytes]


class Looks:
    """Lookups ("looks") that found nothing a moment ago, oldest first."""

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        missed: Callable[[InodeNo, bytes], None],
        was_evicted: Callable[[InodeNo, bytes], bool],
    ) -> None:
        """*missed* is called for each look that counts, with its directory and name.

        *was_evicted* returns whether the name was evicted since it was last missed.
        """
        self._monotonic_s: Final = monotonic_s
        self._missed: Final = missed
        self._was_evicted: Final = was_evicted
        self._kernel_keeps = True
        #: When each name was last looked up (s, monotonic).
        self._waiting: dict[Name, float] = {}
        #: How many further looks for the name wait, if any.
        self._before: dict[Name, int] = {}

    def apply(self, *, kernel_keeps: bool) -> None:
        """Set whether the kernel caches that a name is missing (``negative_timeout_s``)."""
        self._kernel_keeps = kernel_keeps

    def add(self, parent: InodeNo, name: bytes) -> None:
        """A LOOKUP of *name* in *parent* found nothing."""
        if name[-4:] == b".tmp":  # not a block, and one of the two looks of a store
            return
        waiting, key = self._waiting, (parent, name)
        if key in waiting:
            self._again(key)
        elif len(waiting) >= _WAITING_MAX:
            self._count(next(iter(waiting)))
        waiting[key] = self._monotonic_s()

    def _again(self, key: Name) -> None:
        """Note another look for a waiting name, which becomes the youngest."""
        del self._waiting[key]
        before = self._before.get(key, 0)
        if before or self._kernel_keeps or not self._was_evicted(*key):
            self._before[key] = before + 1

    def stored(self, parent: InodeNo, name: bytes, within_s: float) -> None:
        """A block gets the name. A look at most *within_s* ago belonged to the same system call."""
        key = parent, name
        at_s = self._waiting.get(key)
        if at_s is None:
            return
        own = self._monotonic_s() - at_s <= within_s
        if own and not self._before:  # the usual case
            del self._waiting[key]
        else:
            self._count(key, last=not own)

    def made(self, parent: InodeNo, name: bytes) -> None:
        """Something other than a block gets the name: its looks were not for a block."""
        key = parent, name
        self._waiting.pop(key, None)
        self._before.pop(key, None)

    def settle(self, count_max: int = _WAITING_MAX) -> None:
        """Count looks that have waited long enough, at most *count_max* of them."""
        until_s = self._monotonic_s() - RENAME_LOOK_S
        due = takewhile(lambda key: self._waiting[key] <= until_s, self._waiting)
        for key in list(islice(due, count_max)):
            self._count(key)

    def _count(self, key: Name, *, last: bool = True) -> None:
        """Count the looks for the name of *key*; the *last* one may be left out."""
        del self._waiting[key]
        looks = int(last)
        if self._before:
            looks += self._before.pop(key, 0)
        if looks and self._kernel_keeps:
            looks = 1
        for _ in range(looks):
            self._missed(*key)


def key_of(parent: InodeNo, name: bytes) -> int:
    """Return 32 bits that stand for *name* in directory *parent*."""
    return crc32c(name, parent & _KEY_MASK) * _MULTIPLIER & _KEY_MASK


class ReuseWatch:
    """Reuse distances, ages at eviction, and misses after it. Cheap where a request waits.

    All figures are about names, each known by 32 bits of a checksum. What is kept is bounded:
    followed names, the names that were evicted last, and the loads since the last ``count_loads``.
    """

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
        away_s = self._evicted.pop(key, now_s)
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
        self._evicted.remember(key_of(record.parent, record.name), now_s)

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
