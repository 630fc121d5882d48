"""The gate: which blocks are worth their write, learned from what comes back. Pure.

A block belongs to a class by what a file system sees of it: how often its name was asked for, and
where it stands in its burst. The classes are few, so each soon has a rate (class_rates.py). A block
is admitted if its class brings enough hits; how many that must be is tried out (price_trials.py).

A burst is what a client asks for at once: a prompt's blocks, head first. It is judged when it has
ended, because its length tells much.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from kvfs.core.class_rates import CLASSES, ClassRates
from kvfs.core.eviction_policy import Lru
from kvfs.core.known_names import TIMES_MAX, KnownNames
from kvfs.core.price_trials import PriceTrials


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


class GatedLru(Lru):
    """Evicts the block that was not used for the longest time, and judges which may come in."""

    name = "gate"

    def __init__(self, blocks: int, *, price: float = PRICE) -> None:
        """*blocks*: how many the pool holds. *price*: hits that a written block must bring."""
        self._blocks = max(1, blocks)
        self._price = price
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
        return self._trials.threshold

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
        threshold, verdicts, written = trials.threshold, [], 0
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
        self._rates.fade(self._accesses, self._blocks / max(self._written_share, 1 / _STAY_MAX))
