"""When the blocks were touched, by the wall clock: marks that tie the heat's stamps to times.

A stamp orders touches and tells no time: bursts run faster than seconds under load, and stand
still while nobody touches. A mark says that all touches with a stamp below its own came before its
time. Marks lie a second apart at first; the older they are the wider, as many as are kept.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

#: 16 KiB of marks: the last minutes to the second, a week to some minutes.
MARKS_MAX: Final = 1024
_GAP_NS: Final = 1_000_000_000


class Mark(NamedTuple):
    """Touches with a stamp below ``stamp`` came before ``wall_ns`` (since the epoch)."""

    wall_ns: int
    stamp: int


class HeatMarks:
    """The marks of one pool, oldest first; both columns rise."""

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._marks: list[Mark] = []
        for mark in marks:
            self.note(*mark)

    def note(self, wall_ns: int, stamp: int) -> None:
        """Learn that the next touch gets *stamp*, and that it is *wall_ns* now."""
        marks = self._marks
        while marks and marks[-1].wall_ns > wall_ns:  # the clock was set back
            marks.pop()
        if marks and stamp <= marks[-1].stamp:  # nobody touched: the earlier mark tells more
            return
        if len(marks) > 1 and marks[-1].wall_ns - marks[-2].wall_ns < _GAP_NS:
            marks.pop()
        marks.append(Mark(wall_ns, stamp))
        if len(marks) > MARKS_MAX:
            half = len(marks) // 2
            self._marks = marks[:half:2] + marks[half:]

    def stamp_at(self, wall_ns: int) -> int | None:
        """Return a stamp below which all touches came before *wall_ns*; None: no mark is so old."""
        at = bisect_right(self._marks, wall_ns, key=lambda mark: mark.wall_ns)
        return self._marks[at - 1].stamp if at else None

    def all(self) -> tuple[Mark, ...]:
        """Return the marks, oldest first; also in a thread."""
        return tuple(self._marks)
