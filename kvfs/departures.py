"""Extents that nobody has a name for any more, on their way off the device.

Their bytes count as taken until they are really back: who needs room has them removed at once,
else it happens when no request waits.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from kvfs.background import Background
from kvfs.space import Space

#: Unlinking takes some 5 us a MiB of page cache; longer than a request may wait goes to a thread.
_LONG_UNLINK_BYTES: Final = 64 << 20


class Departures:
    """The removals that are due, oldest first."""

    def __init__(self, background: Background, space: Space) -> None:
        self._background = background
        self._space = space
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        #: What the thread has removed since anybody looked.
        self._finished: deque[int] = deque()
        self._in_thread = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._in_thread

    def add(self, remove: Callable[[], None], size_bytes: int) -> None:
        """Queue *remove*, which gives *size_bytes* back."""
        self._space.leaving_bytes += size_bytes
        self._waiting.append((remove, size_bytes))
        self._background.submit(self._next)

    def hurry(self, size_bytes: int) -> None:
        """Remove now until *size_bytes* are unclaimed, or nothing is left to remove."""
        self.settle()
        while self._waiting and self._space.unclaimed_bytes < size_bytes:
            self._background.do(self._first)

    def settle(self) -> None:
        """Count what the thread has removed."""
        while self._finished:
            self._space.leaving_bytes -= self._finished.popleft()
            self._in_thread -= 1

    def _next(self) -> None:
        """Do one as a background job; ``hurry`` may have done it before."""
        self.settle()
        if not self._waiting:
            return
        if self._waiting[0][1] <= _LONG_UNLINK_BYTES:
            self._first()
            return
        remove, size_bytes = self._waiting.popleft()
        self._in_thread += 1
        self._background.submit_long(lambda: self._in_the_thread(remove, size_bytes))

    def _first(self) -> None:
        remove, size_bytes = self._waiting.popleft()
        try:
            remove()
        finally:
            self._space.leaving_bytes -= size_bytes

    def _in_the_thread(self, remove: Callable[[], None], size_bytes: int) -> None:
        try:
            remove()
        finally:
            self._finished.append(size_bytes)
