"""The gate: which blocks are worth their write, learned from what comes back. Pure.

A block belongs to a class by what a file system sees of it: how often its name was asked for, and
where it stands in its burst. The classes are few, so each soon has a rate (``ClassRates``). A block
is admitted if its class brings enough hits; how many that must be is tried out (``PriceTrials``).

A burst is what a client asks for at once: a prompt's blocks, head first. It is judged when it has
ended, because its length tells much.

**Rates.** Counted are returns of names that come within a block's stay in the pool. A class has a
rate: blocks that came back, of all. A block that comes back early needs its room for a part of a
stay only, and counts as that part of a block (Beckmann et al., "LHD: Improving Cache Hit Rate by
Maximizing Hit Density", NSDI 2018). Followed are the names with a low hash, in an array of bounded
size.

**Trials.** Which price of a written byte pays: miniature caches try several on a sample of the
names. Each evicts the least recently used block, and takes a block only if it is worth at least the
cache's threshold. They see every use of a small part of all names, chosen by their hash, and hold
that part of the pool's blocks (Waldspurger et al., "Cache Modeling and Optimization using Miniature
Simulations", ATC 2017).

**Names** that were asked for lately, and how often, are in a table of bytes, 20 of them a block
(``KnownNames``). A name may be in any slot of its bucket. The slots of a bucket are in the order of
their last use, so that the one not used for longest falls off its end.

**A restart** goes on with all but the miniature caches, which fill again within a stay; what each
of them gained is kept (``GatedLru.learned``).
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import inf, isfinite
from typing import Final, NamedTuple

import numpy as np

from kvfs.core.evicted import HASH_BITS
from kvfs.core.eviction_policy import EvictionPolicy, Lru, policy_named
from kvfs.core.learned import Learned
from kvfs.core.write_budget import WriteBudget

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
#: What a block must be worth, in hits while the pool keeps it. The first takes all: plain LRU.
THRESHOLDS: Final = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
#: A miniature cache holds at least this many blocks, if the pool does, and less than twice as many.
_HELD_MIN: Final = 1024
#: Half-life of a hit, in uses per block of a miniature cache: a change of load shows in time.
_HALF_LIFE: Final = 4
#: Another threshold must be better by this many hits to be followed.
_LEAD_MIN: Final = 1.0
#: Names that are remembered for each block of the pool: so many blocks back a return is still seen.
NAMES_A_BLOCK: Final = 10
_BUCKET: Final = 8
#: How often a name was asked for; more often counts as so often.
TIMES_MAX: Final = 4
_TIMES_MASK: Final = TIMES_MAX - 1
_TIMES_BITS: Final = 2
#: What is kept of the counts: version, number of the threshold, blocks, accesses, when the rates
#: were scaled, share written, the budget's state, what each miniature cache gained; then the rates.
_COUNTS: Final = struct.Struct(f"<IIQQQddd{len(THRESHOLDS)}d")
_COUNTS_VERSION: Final = 1
_ACCESSES_BITS: Final = 62
#: A class and its rate: the class, blocks seen, blocks that came back.
_RATE: Final = struct.Struct("<Hdd")


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
        #: When the counts were scaled, in accesses.
        self.scaled_at = 0

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

    def known(self) -> tuple[int, float]:
        """Return how many classes were seen, and how many hits a block brings in a stay."""
        seen = list(self._seen)
        return sum(count >= 1 for count in seen), sum(self._back) / max(1.0, sum(seen))

    def counts(self) -> bytes:
        """Return the rates, to keep them."""
        rates = enumerate(zip(self._seen, self._back, strict=True))
        return b"".join(_RATE.pack(kind, *rate) for kind, rate in rates if any(rate))

    @property
    def table(self) -> memoryview:
        """The names that are followed, to keep them."""
        return memoryview(self._slots).cast("B")

    def recall(self, rates: Iterable[tuple[int, float, float]], scaled_at: int) -> None:
        """Go on with *rates*: classes, with what was seen of each and what came back."""
        for kind, seen, back in rates:
            self._seen[kind], self._back[kind] = seen, back
        self.scaled_at = scaled_at

    def fade(self, now: int, stay: float) -> None:
        """Let what is old fade; *stay*: for how many accesses the pool keeps an unused block."""
        self._horizon = max(1.0, _OF_STAY * stay)
        passed = now - self.scaled_at
        if passed * _FADINGS > stay:
            kept = 0.5 ** (passed / stay)
            self._seen = [count * kept for count in self._seen]
            self._back = [count * kept for count in self._back]
            self.scaled_at = now


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

    @property
    def gains(self) -> list[float]:
        """What each miniature cache gained, to keep it."""
        return list(self._gains)

    def recall(self, threshold: int, gains: Sequence[float]) -> None:
        """Go on with the *threshold* of this number, and with these *gains*."""
        self.threshold, self._gains = THRESHOLDS[threshold], list(gains)


class KnownNames:
    """The names that a pool of *blocks* blocks was asked for.

    A slot has 14 bits of a name's hash, beside the bucket, so that one in 2,000 unknown names is
    taken for a known one.
    """

    def __init__(self, blocks: int) -> None:
        self._buckets = max(1, NAMES_A_BLOCK * blocks // _BUCKET)
        #: Eight bits of the hash, never 0, which is an empty slot; six more bits with the times.
        self._tags = bytearray(_BUCKET * self._buckets)
        self._more = bytearray(_BUCKET * self._buckets)

    @property
    def size_bytes(self) -> int:
        """The memory that the table takes."""
        return len(self._tags) + len(self._more)

    @property
    def tables(self) -> tuple[bytearray, bytearray]:
        """The table, to keep it."""
        return self._tags, self._more

    def times(self, name_hash: int) -> int:
        """Return how often the name with this 32-bit hash was asked for, up to TIMES_MAX; 0: not.

        It is so within the last uses of names, NAMES_A_BLOCK for each block of the pool.
        """
        at = self._find(name_hash, (name_hash * self._buckets >> HASH_BITS) * _BUCKET)
        return 0 if at < 0 else (self._more[at] & _TIMES_MASK) + 1

    def remember(self, name_hash: int, times: int) -> None:
        """Remember that the name was asked for *times* times, the last time now."""
        tags, more = self._tags, self._more
        first = (name_hash * self._buckets >> HASH_BITS) * _BUCKET
        at = self._find(name_hash, first)
        if at < 0 and (at := tags.find(0, first, first + _BUCKET)) < 0:
            at = first + _BUCKET - 1
        if at > first:
            tags[first + 1 : at + 1] = tags[first:at]
            more[first + 1 : at + 1] = more[first:at]
        tags[first] = (name_hash & 0xFF) or 1
        more[first] = name_hash >> 8 << _TIMES_BITS & 0xFC | min(times, TIMES_MAX) - 1

    def _find(self, name_hash: int, first: int) -> int:
        tag, end = (name_hash & 0xFF) or 1, first + _BUCKET
        more = name_hash >> 8 << _TIMES_BITS & 0xFC
        at = self._tags.find(tag, first, end)
        while at >= 0 and self._more[at] & 0xFC != more:
            at = self._tags.find(tag, at + 1, end)
        return at


class Hint(IntEnum):
    """What the client says of a burst. A hint makes other classes, so a wrong one costs little."""

    NONE = 0
    #: The session goes on.
    GOES_ON = 1
    #: One turn, never again.
    ONCE = 2


#: Hits that a written block must bring, if nothing else is said (docs/simulate.md, "The price").
PRICE: Final = 1 / 20
#: Known blocks at the head of a burst: none; one, which many prompts share; more.
_HEADS: Final = 3
#: Lengths of what follows the known head, by their powers of two.
_LENGTHS: Final = 8
#: A stay is taken to be at most so many times the pool, in accesses: more names are not remembered.
_STAY_MAX: Final = 24

assert len(Hint) * _HEADS * _LENGTHS * 2 * (TIMES_MAX + 1) <= CLASSES


class _Counts(NamedTuple):
    """What was kept of the counts, for ``GatedLru.recall``."""

    threshold: int
    blocks: int
    accesses: int
    scaled_at: int
    written_share: float
    budget: tuple[float, float]
    gains: tuple[float, ...]
    rates: list[tuple[int, float, float]]


def _counts_of(data: bytes) -> _Counts | None:
    """Return what *data* has; None if it is of another version, or cannot be."""
    rest = data[_COUNTS.size :]
    if len(data) < _COUNTS.size or len(rest) % _RATE.size:
        return None
    version, threshold, blocks, accesses, scaled_at, share, *more = _COUNTS.unpack_from(data)
    (price, over), gains = more[:2], more[2:]
    rates = list(_RATE.iter_unpack(rest))
    if version != _COUNTS_VERSION or threshold >= len(THRESHOLDS) or not 0 <= share <= 1:
        return None
    if not scaled_at <= accesses < 1 << _ACCESSES_BITS or not all(map(isfinite, more)):
        return None
    if not all(
        kind < CLASSES and 0 <= back < inf and 0 <= seen < inf for kind, seen, back in rates
    ):
        return None
    return _Counts(
        threshold, blocks, accesses, scaled_at, share, (price, over), tuple(gains), rates
    )


def _is_alike(before: int, now: int) -> bool:
    """Whether what was learned of a pool of *before* blocks holds of one that has *now*."""
    return before // 2 <= now <= 2 * before


class GatedLru(Lru):
    """Evicts the block that was not used for the longest time, and judges which may come in."""

    name = "gate"

    def __init__(self, blocks: int, *, price: float = PRICE, budget_bytes: int = 0) -> None:
        """*blocks*: how many the pool holds. *price*: hits that a written block must bring.

        *budget_bytes*: what may be written a day, 0 if that has no bound; who writes counts it.
        """
        self.budget: Final = WriteBudget(budget_bytes)
        self._price = price
        self._begin(blocks)

    def _begin(self, blocks: int) -> None:
        """Know nothing, of a pool of *blocks* blocks."""
        self._blocks = max(1, blocks)
        self._names = KnownNames(self._blocks)
        self._rates = ClassRates(self._blocks)
        self._trials = PriceTrials(self._blocks)
        self._accesses = 0
        #: Share of the accesses that were written lately.
        self._written_share = 1.0

    @property
    def size_bytes(self) -> int:
        """The memory of the arrays; the miniature caches have a bound beside it."""
        return self._names.size_bytes + self._rates.size_bytes

    @property
    def threshold(self) -> float:
        """What a block must be worth now, in hits."""
        return max(self._trials.threshold, self.budget.price)

    @property
    def known(self) -> tuple[int, float]:
        """How many classes it has seen, and how many hits a block brings while it is kept."""
        return self._rates.known()

    def judge(
        self, names: Sequence[int], touches: Sequence[int], hint: Hint = Hint.NONE
    ) -> list[bool]:
        """Return which blocks of a burst are worth a write.

        *names*: 32-bit hashes of the names, in the order in which the blocks were created.
        *touches*: in how many bursts each was used, 0 for those that the pool does not have.
        """
        known = self._names
        times = [had or known.times(name) for name, had in zip(names, touches, strict=True)]
        head = times.index(0) if 0 in times else len(times)
        following = min((len(times) - head + 1).bit_length() - 1, _LENGTHS - 1)
        of_burst = (hint * _HEADS + min(head, _HEADS - 1)) * _LENGTHS + following << 1
        rates, trials, now = self._rates, self._trials, self._accesses
        threshold, verdicts, written = self.threshold, [], 0
        left = len(times)
        for name, had, count in zip(names, touches, times, strict=True):
            left -= 1
            kind = (of_burst | (not left)) * (TIMES_MAX + 1) + min(count, TIMES_MAX)
            worth = rates.of(kind)
            if not name & rates.sample_bits:
                rates.use(name, kind, now)
            if not name & trials.sample_bits:
                trials.use(name, worth, self._price)
            verdicts.append(worth >= threshold)
            if not had:
                known.remember(name, count + 1)
                written += worth >= threshold
        self._count(len(times), written)
        return verdicts

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """A block was stored; True if it was asked for before it was judged."""
        return self._names.times(name_hash) > 1

    def evicted(self, name_hash: int, allocated_bytes: int, touches: int) -> None:
        """Remember the name."""
        self._names.remember(name_hash, touches)

    def _count(self, accesses: int, written: int) -> None:
        self._accesses += accesses
        kept = 0.5 ** (accesses / self._blocks)
        self._written_share *= kept
        self._written_share += written / max(1, accesses) * (1 - kept)
        self._fade()

    def _fade(self) -> None:
        self._rates.fade(self._accesses, self._blocks / max(self._written_share, 1 / _STAY_MAX))

    def learned(self) -> Learned:
        """Return what it knows (``Learner``): at most 20 KiB, and the arrays as tables."""
        rates, trials, names = self._rates, self._trials, self._names
        numbers = (self._blocks, self._accesses, rates.scaled_at, self._written_share)
        threshold = THRESHOLDS.index(trials.threshold)
        budget = self.budget.state
        counts = _COUNTS.pack(_COUNTS_VERSION, threshold, *numbers, *budget, *trials.gains)
        return Learned(counts + rates.counts(), (rates.table, *names.tables))

    def recall(self, learned: Learned, blocks: int) -> None:
        """Go on with it (``Learner``)."""
        found = _counts_of(learned.counts)
        if found is None:
            return
        self.budget.recall(*found.budget)
        if not _is_alike(found.blocks, blocks):
            return
        self._begin(found.blocks)
        self._accesses, self._written_share = found.accesses, found.written_share
        self._trials.recall(found.threshold, found.gains)
        self._rates.recall(found.rates, found.scaled_at)
        self._fade()
        tables = [self._rates.table, *(memoryview(table) for table in self._names.tables)]
        data = memoryview(b"".join(learned.tables))
        if len(data) == sum(map(len, tables)):
            for table in tables:
                table[:], data = data[: len(table)], data[len(table) :]


class MountedGate(GatedLru):
    """The gate of a mount, which judges blocks after they were stored."""

    def __init__(self, budget_bytes: int = 0) -> None:
        super().__init__(1, budget_bytes=budget_bytes)

    def resize(self, blocks: int) -> None:
        """The pool has *blocks* blocks: far more, or fewer, than before forget what was learned.

        A pool that fills has room for all of them, and one that is full keeps its number.
        """
        if not _is_alike(self._blocks, blocks):
            self._begin(blocks)

    def knows(self, name_hash: int) -> bool:
        """Whether the name was asked for lately."""
        return self._names.times(name_hash) > 0

    def admitted(self, name_hash: int, allocated_bytes: int) -> bool:
        """A block was stored; it is judged later."""
        return False


def policy_of(name: str, budget_bytes: int) -> EvictionPolicy:
    """Return the policy of a mount with this ``eviction`` and ``write_budget``."""
    return MountedGate(budget_bytes) if name == MountedGate.name else policy_named(name)
