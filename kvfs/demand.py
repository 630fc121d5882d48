"""How large the next block will be, and how many extents of each size to keep ready for it.

Pure: time is an argument. A guess and no promise: a wrong one costs a preallocation on the hot
path, or spare blocks that are given back at close.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final

from kvfs.types import InodeNo, round_up

#: How far ahead of the creates the queue is kept: two ticks of the ready queue at its present rate.
LEAD_S: Final = 0.5
#: A create counts into the rate for about so long: shorter than a burst, longer than its jitter.
RATE_WINDOW_S: Final = 1.0
#: Connectors store in bursts, one a request; the rate of a burst is remembered for the next one.
PEAK_WINDOW_S: Final = 20.0
#: A size not seen for so long is wanted no more.
FORGET_S: Final = 60.0
#: A directory never seen inherits the last size if so many publishes in a row agreed on it.
AGREEING: Final = 4
#: Sizes tracked at a time; a KV pool has one or two, a copied tree has as many as files.
SIZES_MAX: Final = 64


class _Rate:
    """Creates a second of one size, now and at the last burst's peak."""

    __slots__ = ("_peak", "_rate", "_updated_s", "seen_s")

    def __init__(self, now_s: float) -> None:
        self._rate = 0.0
        self._peak = 0.0
        self._updated_s = now_s
        self.seen_s = now_s

    def note(self, now_s: float) -> None:
        self.seen_s = now_s
        self._decay(now_s)
        self._rate += 1.0 / RATE_WINDOW_S
        self._peak = max(self._peak, self._rate)

    def extents(self, now_s: float) -> int:
        self._decay(now_s)
        return max(1, math.ceil(max(self._rate, self._peak) * LEAD_S))

    def _decay(self, now_s: float) -> None:
        passed_s = now_s - self._updated_s
        if passed_s > 0.0:
            self._rate *= math.exp(-passed_s / RATE_WINDOW_S)
            self._peak *= math.exp(-passed_s / PEAK_WINDOW_S)
            self._updated_s = now_s


class Demand:
    """Sizes lately published by directory, and the rate of creates by size; both bounded.

    Sizes are in bytes; as demand for extents they are rounded up to PAGE_BYTES.
    """

    def __init__(self, directories_max: int) -> None:
        """Remember the last *directories_max* directories that published something."""
        self._directories_max = directories_max
        self._directories: OrderedDict[InodeNo, int] = OrderedDict()
        self._lately: deque[int] = deque(maxlen=AGREEING)
        self._rates: OrderedDict[int, _Rate] = OrderedDict()

    def note_published(self, parent: InodeNo, size_bytes: int, now_s: float) -> None:
        """Learn that a block of *size_bytes* was published in directory *parent*."""
        directories = self._directories
        directories[parent] = size_bytes
        directories.move_to_end(parent)
        if len(directories) > self._directories_max:
            directories.popitem(last=False)
        self._lately.append(size_bytes)
        self._rate(round_up(size_bytes), now_s).seen_s = now_s

    def note_created(self, size_bytes: int, now_s: float) -> None:
        """Learn that a draft took an extent of *size_bytes*, ready or not."""
        self._rate(round_up(size_bytes), now_s).note(now_s)

    def expected_bytes(self, parent: InodeNo) -> int:
        """Return the size the next block of *parent* will likely have; 0 means unknown."""
        size_bytes = self._directories.get(parent)
        if size_bytes is not None:
            return size_bytes
        lately = self._lately
        if lately and lately.count(lately[-1]) == len(lately):
            return lately[-1]
        return 0

    def wanted(self, now_s: float, *, limit_bytes: int, limit_extents: int) -> Mapping[int, int]:
        """Return how many extents of each size to keep ready, within both limits.

        One of every size lately seen comes first, the last seen before the others; what is left
        is shared in proportion to what each size would need.
        """
        counts: dict[int, int] = {}
        needs: dict[int, int] = {}
        for size_bytes in reversed(self._rates):
            rate = self._rates[size_bytes]
            if now_s - rate.seen_s > FORGET_S or limit_extents < 1 or size_bytes > limit_bytes:
                continue
            counts[size_bytes] = 1
            needs[size_bytes] = rate.extents(now_s) - 1
            limit_bytes -= size_bytes
            limit_extents -= 1
        # Whole numbers, since a rounded share could overstep a limit by one extent.
        needed_bytes = sum(size_bytes * need for size_bytes, need in needs.items())
        needed_extents = sum(needs.values())
        for size_bytes, need in needs.items():
            by_bytes = need * limit_bytes // max(needed_bytes, limit_bytes, 1)
            by_extents = need * limit_extents // max(needed_extents, limit_extents, 1)
            counts[size_bytes] += min(by_bytes, by_extents)
        return counts

    def _rate(self, size_bytes: int, now_s: float) -> _Rate:
        rate = self._rates.get(size_bytes)
        if rate is None:
            rate = self._rates[size_bytes] = _Rate(now_s)
            if len(self._rates) > SIZES_MAX:
                self._rates.popitem(last=False)
        self._rates.move_to_end(size_bytes)
        return rate
