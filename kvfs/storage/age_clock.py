"""The clock for ages, which never steps: how long something was unused, kept aside, or idle.

It is near the wall clock, and goes on while the machine sleeps (CLOCK_BOOTTIME, clock_gettime(2)).
Setting the wall clock forward must not make fresh blocks old; setting it back must not keep old
ones for ever. So the wall clock is read once per boot, at the first start of the pool, because only
it can tell how long the pool was not served. It is ignored if it is behind a time seen before.
Later servers of the same boot continue from there, by a number in RUN.

Times that clients see come from the wall clock, and are no measure of an age. Marks pair the stamps
of touches with times of this clock.
"""

import time
from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import Final, NamedTuple

#: Some years beyond 2100: a later time is invalid.
_LATEST_NS: Final = 1 << 62


class AgeClock:
    """The clock of one pool."""

    def __init__(self, base_ns: int) -> None:
        """*base_ns*: the time of this clock when CLOCK_BOOTTIME was 0."""
        #: Kept for the next server of this boot.
        self.base_ns: Final = base_ns

    @classmethod
    def begun(cls, kept_base_ns: int | None, wall_ns: int, seen_ns: int) -> "AgeClock":
        """Return the clock of a server that starts now.

        *kept_base_ns*: the base of the previous server in this boot, None if there was none.
        *wall_ns*: the wall clock. *seen_ns*: the latest time of this clock that a file has.
        """
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now_ns = wall_ns if kept_base_ns is None else kept_base_ns + since_boot_ns
        if seen_ns < _LATEST_NS:
            now_ns = max(now_ns, seen_ns)
        return cls(min(now_ns, _LATEST_NS) - since_boot_ns)

    def now_ns(self) -> int:
        """Return the time in ns, about since the epoch."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self.base_ns


#: 16 KiB of marks: the last minutes to the second, a week to some minutes.
MARKS_MAX: Final = 1024


_GAP_NS: Final = 1_000_000_000


class Mark(NamedTuple):
    """Touches with a stamp below ``stamp`` came before ``time_ns`` (age_clock.py)."""

    time_ns: int
    stamp: int


_TIME: Final = attrgetter("time_ns")
_STAMP: Final = attrgetter("stamp")


class HeatMarks:
    """When the blocks were touched: marks that pair stamps with times of a clock that never steps.

    A stamp orders touches and is not a time: bursts are shorter than a second under load, and do
    not end without touches. New marks are half a second apart on average, older ones farther.
    Marks are ordered, oldest first; stamps and times both rise.
    """

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._marks: list[Mark] = []
        for mark in marks:
            self.add(*mark)

    def add(self, time_ns: int, stamp: int) -> None:
        """Add a mark: it is *time_ns* now, and the next touch gets *stamp*."""
        marks = self._marks
        while marks and marks[-1].time_ns > time_ns:  # from a clock that was ahead
            marks.pop()
        if marks and stamp <= marks[-1].stamp:  # no touch since: the earlier time is more exact
            return
        # Drop the last mark only if the one before it is almost as young as this one: it may be the
        # only one that tells how old a block is.
        if len(marks) > 1 and time_ns - marks[-2].time_ns < _GAP_NS:
            marks.pop()
        marks.append(Mark(time_ns, stamp))
        if len(marks) > MARKS_MAX:
            half = len(marks) // 2
            self._marks = marks[:half:2] + marks[half:]

    @property
    def latest_ns(self) -> int:
        """The time of the last mark (ns); 0: there is none."""
        return self._marks[-1].time_ns if self._marks else 0

    def stamp_at(self, time_ns: int) -> int | None:
        """Return a stamp: touches with a lower one came before *time_ns*. None: unknown."""
        at = bisect_right(self._marks, time_ns, key=_TIME)
        return self._marks[at - 1].stamp if at else None

    def time_of(self, stamp: int) -> int | None:
        """Return the earliest known time (ns) before which the touch with *stamp* came.

        None if it came after the last mark.
        """
        at = bisect_right(self._marks, stamp, key=_STAMP)
        return self._marks[at].time_ns if at < len(self._marks) else None

    def all(self) -> tuple[Mark, ...]:
        """Return the marks, oldest first; may be called in any thread."""
        return tuple(self._marks)
