"""When a server that has died is started again, and when no more. Values only: time is an argument.

Callers wait meanwhile, so the first try is at once, and what is in vain must be known soon.
"""

from typing import Final

#: Calls end that long after the death of a server that cannot be had again.
GIVE_UP_S: Final = 2.0
#: Less tells nothing: a start may fail by chance.
TRIES_MIN: Final = 2
#: More would be of no use: the same start on the same index.
TRIES_MAX: Final = 5
FIRST_PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
#: A server that was ready and died sooner has perhaps died of a request: it comes again, first.
SHORT_LIFE_S: Final = 0.125
#: That many short lives in a row are no chance; each of the last ones waits longer.
SHORT_LIVES_MAX: Final = 10
#: They are excused: somebody may kill servers fast, to see what happens.
SHORT_LIVES_FREE: Final = 3


class Restarts:
    """Counts the deaths in a row."""

    def __init__(self) -> None:
        self._failed_starts = 0
        self._short_lives = 0
        #: When the callers' wait began, or when a server said last that it comes on.
        self._since_s = 0.0
        self._started_s = 0.0
        self._ready_s: float | None = None

    def started(self, now_s: float) -> None:
        """A server starts."""
        self._started_s = now_s
        self._since_s = self._since_s or now_s
        self._ready_s = None

    def alive(self, now_s: float) -> None:
        """It says that it comes on; what takes long is no failure."""
        self._started_s = self._since_s = now_s

    def ready(self, now_s: float) -> None:
        """It serves."""
        self._failed_starts = 0
        self._ready_s = now_s

    def replaced(self, now_s: float) -> None:
        """It was ended for another one, which starts now: that is no death."""
        self._failed_starts = 0
        self._since_s = now_s

    def died(self, now_s: float) -> float | None:
        """Return how long to wait before the next start; None: it is no use."""
        if self._ready_s is not None:
            return self._after_life(now_s, now_s - self._ready_s)
        self._failed_starts += 1
        if self._failed_starts >= TRIES_MAX:
            return None
        pause_s = FIRST_PAUSE_S * 2.0 ** (self._failed_starts - 1)
        end_s = now_s + pause_s + (now_s - self._started_s)
        late = end_s - self._since_s > GIVE_UP_S
        return None if late and self._failed_starts >= TRIES_MIN else pause_s

    def _after_life(self, now_s: float, lived_s: float) -> float | None:
        self._since_s = now_s
        self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        if self._short_lives >= SHORT_LIVES_MAX:
            return None
        if self._short_lives <= SHORT_LIVES_FREE:
            return 0.0
        longer = 2.0 ** (self._short_lives - SHORT_LIVES_FREE - 1)
        return min(PAUSE_MAX_S, FIRST_PAUSE_S * longer)
