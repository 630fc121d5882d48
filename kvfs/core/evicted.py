"""Names of evicted blocks, and what a tier behind this one would have given back. Pure.

A name is known by 32 bits of a hash. Names with a low hash are the sample that is counted (SHARDS:
Waldspurger et al., FAST 2015): each is remembered for a day, and stands for as many as the sample
is small. The others are remembered as long as there is room. The sample gets smaller when too many
are evicted in a day.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

HASH_BITS: Final = 32
HASHES: Final = 1 << HASH_BITS
_TICKS_PER_S: Final = 16
_MASK: Final = (1 << 32) - 1
#: Slots in which a name may be.
_BUCKET_SLOTS: Final = 8
#: A slot: 32 bits of the hash and 32 bits of time in one word, the block's bytes in another.
_SLOT_WORDS: Final = 2
#: Words before the slots: hashes below the first one are the sample; 0: all are.
_HEAD_WORDS: Final = 1
#: How long a tier behind may keep what is evicted here, by the names that `kvfs status` uses.
AGES_S: Final[Mapping[str, int]] = {
    "1m": 60,
    "10m": 600,
    "1h": 3600,
    "6h": 21_600,
    "1d": 86_400,
}
DAY_S: Final = AGES_S["1d"]


#: Names that are remembered: 16 bytes each, a MiB in all.
NAMES_MAX: Final = 1 << 16


def words_of(names_max: int) -> int:
    """Return how many 64-bit words ``EvictedNames`` needs for *names_max*, a power of two."""
    assert names_max & names_max - 1 == 0, "a bucket is chosen by the low bits"
    return _HEAD_WORDS + _SLOT_WORDS * max(names_max, _BUCKET_SLOTS)


class Return(NamedTuple):
    """An evicted name that is asked for, or stored, again."""

    #: Since its eviction.
    away_s: float
    size_bytes: int
    #: How many names it stands for; 0: it is none of the sample.
    weight: float


class EvictedNames:
    """When each name was evicted, and its size; a hash table of buckets in given memory."""

    def __init__(self, words: memoryview) -> None:
        """*words*: ``words_of`` a number of names, of format "Q"; zeros, or what another filled."""
        self._words: Final = words
        self._buckets_mask: Final = (len(words) - _HEAD_WORDS) // (_SLOT_WORDS * _BUCKET_SLOTS) - 1
        #: Whether any name was ever remembered: a pool that is not full need not look.
        self._is_used = bool(np.asarray(words).any())

    @classmethod
    def of(cls, names_max: int) -> "EvictedNames":
        """Return an empty table; the kernel gives memory to a slot when it is first used."""
        return cls(np.zeros(words_of(names_max), np.uint64).data)

    @property
    def share(self) -> float:
        """The sample, as a share of all names."""
        return self._below / HASHES

    @property
    def _below(self) -> int:
        return self._words[0] or HASHES

    def remember(self, name_hash: int, size_bytes: int, now_s: float) -> None:
        """Remember that the name was evicted at *now_s* (monotonic clock)."""
        ticks = _ticks(now_s)
        slot = self._place_for(name_hash, ticks)
        self._is_used = True
        self._words[slot + 1] = size_bytes
        self._words[slot] = name_hash << 32 | ticks

    def __contains__(self, name_hash: int) -> bool:
        return self._is_used and self._find(name_hash) is not None

    def pop(self, name_hash: int, now_s: float) -> Return | None:
        """Return what is known of the name's eviction, and forget it; None if that is nothing."""
        slot = self._find(name_hash)
        if slot is None:
            return None
        away = _ticks(now_s) - self._words[slot] & _MASK
        self._words[slot] = 0
        counts = name_hash < self._below and away <= DAY_S * _TICKS_PER_S
        weight = HASHES / self._below if counts else 0.0
        return Return(away / _TICKS_PER_S, self._words[slot + 1], weight)

    def _bucket(self, name_hash: int) -> range:
        first = _HEAD_WORDS + (name_hash & self._buckets_mask) * _BUCKET_SLOTS * _SLOT_WORDS
        return range(first, first + _BUCKET_SLOTS * _SLOT_WORDS, _SLOT_WORDS)

    def _find(self, name_hash: int) -> int | None:
        words = self._words
        for slot in self._bucket(name_hash):
            held = words[slot]
            if held and held >> 32 == name_hash:
                return slot
        return None

    def _place_for(self, name_hash: int, ticks: int) -> int:
        """Return the slot of the name, an empty one, or that of the oldest that is not counted."""
        words, below = self._words, self._below
        place, most = 0, -1
        for slot in self._bucket(name_hash):
            held = words[slot]
            if not held or held >> 32 == name_hash:
                return slot
            age = ticks - held & _MASK
            if age > most and (held >> 32 >= below or age > DAY_S * _TICKS_PER_S):
                place, most = slot, age
        return place or self._place_of_sample(name_hash)

    def _place_of_sample(self, name_hash: int) -> int:
        """Leave the highest hash of the name's bucket, and all above it, out of the sample."""
        highest = max(self._bucket(name_hash), key=self._words.__getitem__)
        self._words[0] = max(1, self._words[highest] >> 32)
        return highest


def _ticks(now_s: float) -> int:
    """Return the time in ticks, in 32 bits; never 0, which means an empty slot."""
    return int(now_s * _TICKS_PER_S) + 1 & _MASK or 1


class _Age:
    """What came back within one age."""

    __slots__ = ("missed", "read_bytes", "stored_again")

    def __init__(self) -> None:
        self.missed = self.stored_again = self.read_bytes = 0.0

    def gain(self, asked: int) -> float | None:
        """Return what the hit rate would gain. What was stored again counts as asked for, too."""
        if not asked + self.stored_again:
            return None
        gained = self.missed + self.stored_again
        return round(min(1.0, gained / (asked + self.stored_again)), 6)


class TierBehind:
    """What a tier would have had that gets each block when it is evicted here."""

    def __init__(self) -> None:
        self._ages: Final = {name: _Age() for name in AGES_S}
        self._evicted_bytes = 0

    def evicted(self, size_bytes: int) -> None:
        """A block went: the tier would have got it."""
        self._evicted_bytes += size_bytes

    def missed(self, found: Return) -> None:
        """A client asked for an evicted name."""
        for age in self._within(found):
            age.missed += found.weight

    def stored(self, found: Return) -> None:
        """An evicted block was stored again, and nobody had asked for it since."""
        for age in self._within(found):
            age.stored_again += found.weight

    def _within(self, found: Return) -> list[_Age]:
        ages = [age for name, age in self._ages.items() if found.away_s <= AGES_S[name]]
        for age in ages:
            age.read_bytes += found.weight * found.size_bytes
        return ages

    def shown(self, asked: int, uptime_s: float) -> dict[str, Any]:
        """Return the figures for `kvfs status`.

        *asked*: hits and misses, in *uptime_s* since the first figure.
        """
        rate = self._evicted_bytes / max(1.0, uptime_s)
        return {
            "daily_bytes": int(rate * DAY_S),
            "ages": {
                name: {
                    "missed": round(age.missed),
                    "stored_again": round(age.stored_again),
                    "hit_rate_gain": age.gain(asked),
                    "read_bytes": int(age.read_bytes),
                    "held_bytes": int(min(self._evicted_bytes, rate * AGES_S[name])),
                }
                for name, age in self._ages.items()
            },
        }
