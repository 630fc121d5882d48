"""How much space to keep free ahead of writers, and how much they may write without asking.

Pure: time is an argument. A passthrough writer allocates in the backing file system and cannot be
made to wait. So the space that it takes until the next check must be free in advance.
"""

import math
from typing import Final

from kvfs.core.types import round_up

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

    def note(self, size_bytes: int, now_s: float) -> None:
        """Note that writers took *size_bytes*."""
        self._decay(now_s)
        self._taken_bytes += size_bytes

    def speed(self, now_s: float) -> float:
        """Return how many bytes a second writers take now."""
        self._decay(now_s)
        return self._taken_bytes / _SPEED_WINDOW_S

    def target_bytes(self, now_s: float) -> int:
        """Return how much space should be free now."""
        wanted_bytes = int(self.speed(now_s) * LAG_S)
        return max(self._least_bytes, min(wanted_bytes, self.most_bytes))

    def _decay(self, now_s: float) -> None:
        passed_s = now_s - self._updated_s
        if passed_s > 0.0:
            self._taken_bytes *= math.exp(-passed_s / _SPEED_WINDOW_S)
            self._updated_s = now_s
