"""How long requests take in the server, from the read to the answer, by kind; a sample of them.

Reading the clock twice for each would cost as much as some requests do; a sample tells the same.
What request_reader.py answers itself is not timed: it takes some microseconds.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Final

from kvfs.core.latency import Latency

#: One in this many requests of a kind is timed. A prime, so that it does not fall into step with a
#: client whose every second, fourth or tenth request is different.
TIMED_OF: Final = 61
#: Timed requests without an answer yet; more are not timed.
_RUNNING_MAX: Final = 1024


class RequestTimes:
    """The times of one mount's requests."""

    def __init__(self, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._clock_ns: Final = clock_ns
        #: Timed requests that wait for their answer: kind and begin, by ``unique``.
        self.running: Final[dict[int, tuple[int, int]]] = {}
        self.by_code: Final[dict[int, Latency]] = {}

    def begin(self, unique: int, code: int) -> None:
        """Time the request *unique*, which was just read."""
        if len(self.running) < _RUNNING_MAX:
            self.running[unique] = code, self._clock_ns()

    def end(self, unique: int) -> None:
        """Count the request *unique*, which was just answered, if it is timed."""
        begun = self.running.pop(unique, None)
        if begun is not None:
            code, begun_ns = begun
            if (latency := self.by_code.get(code)) is None:
                latency = self.by_code[code] = Latency()
            latency.add(self._clock_ns() - begun_ns)
