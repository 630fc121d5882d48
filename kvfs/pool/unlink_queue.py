"""Extents that nobody has a name for any more, on their way off the device.

Their bytes count as taken until they are really back: who needs room has them removed at once,
else it happens when no request waits. One that somebody has open or mapped still lingers: its
bytes would not come back. A reader on passthrough gives up his extent a moment after his close.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.pool.space import Space
from kvfs.storage.background import Background

#: Unlinking takes some 5 us a MiB of page cache; longer than a request may wait goes to a thread.
_LONG_UNLINK_BYTES: Final = 64 << 20
#: Looks at extents in use cost some 10 us each; more take turns.
_LOOKS: Final = 16


def _nobody() -> bool:
    return False


class _Departure(NamedTuple):
    remove: Callable[[], None]
    size_bytes: int
    in_use: Callable[[], bool]


class UnlinkQueue:
    """The removals that are due, oldest first."""

    def __init__(self, background: Background, space: Space) -> None:
        self._background = background
        self._space = space
        self._waiting: deque[_Departure] = deque()
        #: In use when their turn came, longest looked at first.
        self._lingering: deque[_Departure] = deque()
        #: What the thread has removed since anybody looked.
        self._finished: deque[int] = deque()
        self._in_thread = 0

    def __len__(self) -> int:
        """Return how many give their bytes back without anybody's doing."""
        return len(self._waiting) + self._in_thread

    @property
    def lingering(self) -> int:
        """How many have no handle any more, and somebody uses them still."""
        return len(self._lingering)

    def add(
        self, remove: Callable[[], None], size_bytes: int, in_use: Callable[[], bool] = _nobody
    ) -> None:
        """Queue *remove*, which gives *size_bytes* back unless the extent is *in_use*."""
        self._space.leaving_bytes += size_bytes
        self._waiting.append(_Departure(remove, size_bytes, in_use))
        self._background.submit(self._next)

    def hurry(self, size_bytes: int) -> None:
        """Remove now until *size_bytes* are unclaimed, or nothing is left to remove."""
        self.settle()
        while self._waiting and self._space.unclaimed_bytes < size_bytes:
            self._background.do(self._first)

    def settle(self) -> None:
        """Count what the thread has removed, and let go of what is in use no more."""
        while self._finished:
            self._space.leaving_bytes -= self._finished.popleft()
            self._in_thread -= 1
        for _ in range(min(_LOOKS, len(self._lingering))):
            departure = self._lingering.popleft()
            if departure.in_use():
                self._lingering.append(departure)
            else:
                self._leave(departure)

    def dismiss(self) -> None:
        """Have all removed, whoever uses them: the pool stops."""
        while self._lingering:
            self._leave(self._lingering.popleft()._replace(in_use=_nobody))
        self._waiting = deque(departure._replace(in_use=_nobody) for departure in self._waiting)

    def _leave(self, departure: _Departure) -> None:
        self._space.lingering_bytes -= departure.size_bytes
        self.add(*departure)

    def _next(self) -> None:
        """Do one as a background job; ``hurry`` may have done it before."""
        self.settle()
        while self._waiting and self._lingers(self._waiting[0]):
            pass
        if not self._waiting:
            return
        if self._waiting[0].size_bytes <= _LONG_UNLINK_BYTES:
            self._remove(self._waiting.popleft())
            return
        departure = self._waiting.popleft()
        self._in_thread += 1
        self._background.submit_long(lambda: self._in_the_thread(departure))

    def _first(self) -> None:
        if not self._lingers(self._waiting[0]):
            self._remove(self._waiting.popleft())

    def _lingers(self, departure: _Departure) -> bool:
        """Put *departure*, the first one, aside if it is in use."""
        if not departure.in_use():
            return False
        self._lingering.append(self._waiting.popleft())
        self._space.leaving_bytes -= departure.size_bytes
        self._space.lingering_bytes += departure.size_bytes
        return True

    def _remove(self, departure: _Departure) -> None:
        try:
            departure.remove()
        finally:
            self._space.leaving_bytes -= departure.size_bytes

    def _in_the_thread(self, departure: _Departure) -> None:
        try:
            departure.remove()
        finally:
            self._finished.append(departure.size_bytes)
