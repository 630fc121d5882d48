"""How much space to keep ready for the next blocks, and free ahead of the writers of all others.

Pure: time is an argument. How large the next block will be is only a guess: a wrong one costs a
preallocation on the hot path, or spare blocks that are freed at close. A passthrough writer
allocates in the backing file system and cannot be made to wait. So the space that it takes until
the next check must be free in advance.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final

from kvfs.core.types import PAGE_BYTES, InodeNo, round_up

#: Time from a check of the writers until space is free (a tick, a plan and the unlinks), on a
#: machine that is short of CPU.
LAG_S: Final = 0.1
#: A write counts towards the speed for about this long.
_SPEED_WINDOW_S: Final = 0.5
#: Bounds of the headroom, as shares of the capacity.
_LEAST_SHARE: Final = 1 / 128
_MOST_SHARE: Final = 1 / 32
_MOST_LEAST_BYTES: Final = 256 << 20
#: What one writer without a reserve takes between two checks, at memory speed.
UNWATCHED_BYTES: Final = 128 << 20
#: What is kept free for such a writer if it took nothing lately.
_RUNNER_LEAST_BYTES: Final = 16 << 20
#: A draft that outgrew its reserve may take this many times as much until the next check.
_GOES_ON: Final = 4
#: Half of the difference between the largest and the usual size is kept free beyond reserves. Of
#: sizes between 0.5 and 64 MiB at most one in 20,000 exceeds the largest of the last 64 or more by
#: more than that (simulated, evenly spread by their logarithm).
_RECORD_PART: Final = 2
#: What all open drafts together may hold beyond the usual size, so that few outgrow their reserve.
_SPARE_SHARE: Final = 1 / 32


def reserve_bytes(
    usual_bytes: int, largest_bytes: int, *, spared_bytes: int, capacity_bytes: int
) -> int:
    """Return how much to preallocate for a draft whose directory stored such sizes lately.

    The largest of them, so that hardly any draft outgrows its reserve. But the excess over the
    usual size is space that blocks cannot use. Once all excess together reaches a share of the
    capacity, the usual size is enough.
    """
    spare_bytes = max(0, largest_bytes - usual_bytes)
    if spared_bytes + spare_bytes <= capacity_bytes * _SPARE_SHARE:
        return round_up(max(usual_bytes, largest_bytes))
    return round_up(usual_bytes)


def outgrowing_bytes(usual_bytes: int, largest_bytes: int) -> int:
    """Return what a draft may take beyond a reserve of the largest recent size without asking.

    For all such drafts together: few of them set a new record, and hardly two at once.
    """
    return max(0, largest_bytes - usual_bytes) // _RECORD_PART


def lacking_bytes(outgrown_bytes: int, *, unreserved: bool) -> int:
    """Return the bytes that a draft may take next if it grew *outgrown_bytes* since the check."""
    least_bytes = _RUNNER_LEAST_BYTES if unreserved else 0
    return min(max(least_bytes, _GOES_ON * outgrown_bytes), UNWATCHED_BYTES)


class Headroom:
    """The space to keep free ahead of writers, from their recent speed."""

    def __init__(self, capacity_bytes: int) -> None:
        self._least_bytes = min(int(capacity_bytes * _LEAST_SHARE), _MOST_LEAST_BYTES)
        #: The most that is kept free, however fast they write.
        self.most_bytes = int(capacity_bytes * _MOST_SHARE)
        self._taken_bytes = 0.0
        self._updated_s = 0.0

    def count(self, size_bytes: int, now_s: float) -> None:
        """Count *size_bytes* that writers took."""
        self._decay(now_s)
        self._taken_bytes += size_bytes

    def speed(self, now_s: float) -> float:
        """Return how many bytes a second writers take now."""
        self._decay(now_s)
        return self._taken_bytes / _SPEED_WINDOW_S

    def target_bytes(self, now_s: float) -> int:
        """Return how much space should be free now."""
        return self.bytes_at(self.speed(now_s))

    def short_bytes(self, free_bytes: int, now_s: float) -> int:
        """Return how many bytes are missing if *free_bytes* are free; below 0: none is."""
        return self.bytes_at(self.speed(now_s)) - free_bytes

    def bytes_at(self, speed: float) -> int:
        """Return how much space should be free while writers take *speed* bytes a second."""
        wanted_bytes = int(speed * LAG_S)
        return max(self._least_bytes, min(wanted_bytes, self.most_bytes))

    def _decay(self, now_s: float) -> None:
        passed_s = now_s - self._updated_s
        if passed_s > 0.0:
            self._taken_bytes *= math.exp(-passed_s / _SPEED_WINDOW_S)
            self._updated_s = now_s


#: Ready extents are kept for the creates of this time: two ticks of the ready queue.
LEAD_S: Final = 0.5
#: A create counts towards the rate for about this long: shorter than a burst, longer than jitter.
RATE_WINDOW_S: Final = 1.0
#: Connectors store in bursts, one per request. The rate of a burst is remembered for the next one.
PEAK_WINDOW_S: Final = 20.0
#: A size not seen for this long is forgotten.
FORGET_S: Final = 60.0
#: A new directory inherits the last size if this many publishes in a row had it.
AGREEING: Final = 4
#: Sizes tracked at a time; a KV pool has one or two, a copied tree has as many as files.
SIZES_MAX: Final = 64
#: The usual size: a mean over this many publishes, or the last size if within 1/_USUAL_PART of it.
_USUAL_OF: Final = 16
_USUAL_PART: Final = 8
#: The largest size of a directory is that of its last publishes, one to two times this many.
LARGEST_OF: Final = 64


class _Rate:
    """Creates per second of one size, now and at the last burst's peak."""

    __slots__ = ("_peak", "_rate", "_updated_s", "seen_s")

    def __init__(self, now_s: float) -> None:
        self._rate = 0.0
        self._peak = 0.0
        self._updated_s = now_s
        self.seen_s = now_s

    def count(self, now_s: float) -> None:
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


class _Sizes:
    """What a directory published: the last size, the usual one, and the largest of late."""

    __slots__ = ("_count", "_mean_bytes", "former_bytes", "last_bytes", "present_bytes")

    def __init__(self) -> None:
        self.last_bytes = 0
        self._mean_bytes = 0.0
        self.former_bytes = 0
        self.present_bytes = 0
        self._count = 0

    def add(self, size_bytes: int) -> None:
        self.last_bytes = size_bytes
        part = _USUAL_OF if self._mean_bytes else 1
        self._mean_bytes += (size_bytes - self._mean_bytes) / part
        self._count += 1
        if self._count > LARGEST_OF:
            self.former_bytes, self.present_bytes, self._count = self.present_bytes, 0, 1
        self.present_bytes = max(self.present_bytes, size_bytes)

    @property
    def usual_bytes(self) -> int:
        mean_bytes = int(self._mean_bytes)
        if abs(self.last_bytes - mean_bytes) <= mean_bytes // _USUAL_PART:
            return self.last_bytes
        # Rounded to few different sizes, so that there can be ready extents of each.
        step_bytes = max(PAGE_BYTES, 1 << max(0, mean_bytes.bit_length() - 3))
        largest_bytes = max(self.former_bytes, self.present_bytes)
        return min(largest_bytes, round_up(mean_bytes, step_bytes))


class SizeForecast:
    """Recently published sizes by directory, and the rate of creates by size; both bounded.

    Sizes are in bytes; as demand for extents they are rounded up to PAGE_BYTES.
    """

    def __init__(self, directories_max: int) -> None:
        """Remember the last *directories_max* directories that published something."""
        self._directories_max = directories_max
        self._directories: OrderedDict[InodeNo, _Sizes] = OrderedDict()
        self._lately: deque[int] = deque(maxlen=AGREEING)
        #: Whether the first block of each directory was as large as forecast, or smaller.
        self._believed: deque[bool] = deque(maxlen=AGREEING)
        self._rates: OrderedDict[int, _Rate] = OrderedDict()

    def note_published(self, parent: InodeNo, size_bytes: int, now_s: float) -> None:
        """Note that a block of *size_bytes* was published in directory *parent*."""
        directories = self._directories
        sizes = directories.get(parent)
        if sizes is None:
            self._believed.append(size_bytes <= self.expected_bytes(parent))
            sizes = directories[parent] = _Sizes()
        sizes.add(size_bytes)
        directories.move_to_end(parent)
        if len(directories) > self._directories_max:
            directories.popitem(last=False)
        self._lately.append(size_bytes)
        self._rate(round_up(size_bytes), now_s).seen_s = now_s

    def note_created(self, size_bytes: int, now_s: float) -> None:
        """Note that a draft took an extent of *size_bytes*, ready or not."""
        self._rate(round_up(size_bytes), now_s).count(now_s)

    def expected_bytes(self, parent: InodeNo) -> int:
        """Return the size the next block of *parent* will likely have; 0 means unknown."""
        sizes = self._directories.get(parent)
        if sizes is not None:
            return sizes.last_bytes
        lately = self._lately
        if lately and lately.count(lately[-1]) == len(lately):
            return lately[-1]
        return 0

    def usual_bytes(self, parent: InodeNo) -> int:
        """Return the usual recent size: the last one, or the mean if they differ much."""
        return self.recent_bytes(parent)[0]

    def recent_bytes(self, parent: InodeNo) -> tuple[int, int]:
        """Return the usual size, and the largest that *parent* published recently; 0: unknown."""
        sizes = self._directories.get(parent)
        if sizes is None:
            return (expected_bytes := self.expected_bytes(parent)), expected_bytes
        return sizes.usual_bytes, max(sizes.former_bytes, sizes.present_bytes)

    def foretells(self, parent: InodeNo) -> bool:
        """Whether the next size in *parent* is known from its own blocks, or from similar ones.

        A directory that has stored nothing yet inherits a size. That is right if blocks are spread
        over many directories, and wrong for a new kind of blocks.
        """
        believed = self._believed
        return parent in self._directories or (len(believed) == AGREEING and all(believed))

    def wanted(self, now_s: float, *, limit_bytes: int, limit_extents: int) -> Mapping[int, int]:
        """Return how many extents of each size to keep ready, within both limits.

        First one of every recent size, the last seen first. The rest is shared in proportion to
        what each size would need.
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
        # Whole numbers, since a rounded share could exceed a limit by one extent.
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
