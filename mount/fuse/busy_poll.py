"""Waiting for the next request: polling for a moment if it is likely to come at once.

Storing a block takes nine requests, most sent as soon as the one before is answered. Sleeping in
between costs the server a turn of the scheduler and makes the client wake another CPU, while both
contend for the queue's lock (fuse_dev_poll in linux/fs/fuse/dev.c). So the wait learns which kinds
of request are followed by another at once, and polls after those. Like SO_BUSY_POLL of sockets
(socket(7)), it trades a bounded amount of CPU time for latency.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Final

#: After this many immediate successors in a row another one is expected. Requests of two clients
#: that coincide by chance seldom make such a streak.
_SURE: Final = 2
#: A sleeping server that is woken within this many times the busy-poll time would have seen the
#: request while polling: most of that delay is the wake-up itself.
_WAKING: Final = 3


class BusyPoll:
    """Waits for requests. ``poll`` takes milliseconds; true means that one is there (poll(2))."""

    __slots__ = ("_busy_ns", "_clock_ns", "_poll", "_streaks")

    def __init__(
        self,
        poll: Callable[[int], object],
        busy_us: int,
        kinds: int,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """*busy_us*: the longest busy poll, 0: none; *kinds*: the number of request kinds."""
        self._poll = poll
        self._clock_ns = clock_ns
        self._busy_ns = busy_us * 1000
        #: By the kind of the last request: how often in a row the next one came at once.
        self._streaks = [0] * kinds

    def wait(self, after: int, longest_ms: int) -> bool:
        """Wait *longest_ms* at most for the request after one of kind *after*; True if it came."""
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
