"""Waiting for the next request: polling for a moment if it is likely to come at once.

A store is nine requests, most of them sent as soon as the one before is answered. To sleep in
between costs the server a turn of the scheduler and the client the waking of another CPU, in the
midst of which both want the queue's lock (fuse_dev_poll in linux/fs/fuse/dev.c). So the wait
learns after which kinds of request the next one comes at once. As busy_poll of sockets does
(socket(7), SO_BUSY_POLL), it trades a bounded time of a CPU for that.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Final

#: So many times in a row the next one came at once: it will again. Two clients' requests that
#: happen to meet are seldom so many.
_SURE: Final = 2
#: A request that woke the server within so many times the busy wait would have come during it:
#: the waking itself takes longer than the client did.
_WAKING: Final = 3


class BusyPoll:
    """Waits for requests; ``poll`` takes ms and is true when one is there (poll(2))."""

    __slots__ = ("_busy_ns", "_clock_ns", "_poll", "_streaks")

    def __init__(
        self,
        poll: Callable[[int], object],
        busy_us: int,
        kinds: int,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """Stay awake for at most *busy_us* at a time, never with 0; requests are of *kinds*."""
        self._poll = poll
        self._clock_ns = clock_ns
        self._busy_ns = busy_us * 1000
        #: By the kind of the last request: how often in a row the next one came at once.
        self._streaks = [0] * kinds

    def wait(self, after: int, longest_ms: int) -> bool:
        """Wait for what follows a request of kind *after*; whether it came within *longest_ms*."""
        poll, clock_ns = self._poll, self._clock_ns
        streaks, busy_ns = self._streaks, self._busy_ns
        began_ns = clock_ns()
        if streaks[after] >= _SURE:
            while clock_ns() - began_ns < busy_ns:
                if poll(0):
                    return True
            streaks[after] = 0
            return bool(poll(longest_ms))
        came = bool(poll(longest_ms))
        at_once = came and clock_ns() - began_ns < _WAKING * busy_ns
        streaks[after] = streaks[after] + 1 if at_once else 0
        return came
