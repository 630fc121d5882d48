"""When a dead server is started again, and when to give up. Values only: time is an argument.

Callers wait meanwhile, so the first try is at once. The number of tries decides when to give up,
not the time: a start may just be slow because the machine is loaded.
"""

from typing import Final, NamedTuple

#: A server that was ready and died sooner was perhaps killed by a request. The kernel sends that
#: one again, first.
SHORT_LIFE_S: Final = 0.125
FIRST_PAUSE_S: Final = 0.1


class Tolerance(NamedTuple):
    """How many deaths of one kind in a row are tolerated, and the pause after each."""

    deaths_max: int
    at_once: int
    """The first deaths, without a pause; after those the pauses double."""
    pause_max_s: float

    def pause_s(self, deaths: int) -> float | None:
        """Return the seconds to wait after *deaths* in a row; None: give up."""
        if deaths >= self.deaths_max:
            return None
        if deaths <= self.at_once:
            return 0.0
        return min(self.pause_max_s, FIRST_PAUSE_S * 2.0 ** (deaths - self.at_once - 1))


#: A start that fails by itself fails again: it is the same start on the same index.
FAILED_STARTS: Final = Tolerance(deaths_max=5, at_once=0, pause_max_s=2.0)
#: With growing pauses, as the same request may kill each of them.
SHORT_LIVES: Final = Tolerance(deaths_max=10, at_once=3, pause_max_s=2.0)
#: SIGKILL comes from outside: from somebody who kills servers in a loop, or for a passing lack of
#: memory. All pauses together are some 45 s.
KILLED: Final = Tolerance(deaths_max=12, at_once=1, pause_max_s=10.0)


class Restarts:
    """Counts the deaths in a row."""

    def __init__(self) -> None:
        self._failed_starts = self._short_lives = self._killed = 0
        self._ready_s: float | None = None

    @property
    def deaths(self) -> int:
        """How many have died in a row, none of which served for long."""
        return self._failed_starts + self._short_lives + self._killed

    def started(self) -> None:
        """Note that a server starts."""
        self._ready_s = None

    def ready(self, now_s: float) -> None:
        """Note that it serves."""
        self._failed_starts = 0
        self._ready_s = now_s

    def replaced(self) -> None:
        """Note that it was ended for another one, which starts now: that is no death."""
        self._failed_starts = self._killed = 0

    def died(self, now_s: float, *, by_sigkill: bool) -> float | None:
        """Return the seconds to wait before the next start; None: give up."""
        if self._ready_s is not None and now_s - self._ready_s >= SHORT_LIFE_S:
            self._failed_starts = self._short_lives = self._killed = 0
            return 0.0
        if by_sigkill:
            self._killed += 1
            return KILLED.pause_s(self._killed)
        if self._ready_s is None:
            self._failed_starts += 1
            return FAILED_STARTS.pause_s(self._failed_starts)
        self._short_lives += 1
        return SHORT_LIVES.pause_s(self._short_lives)
