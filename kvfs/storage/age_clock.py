"""The clock by which ages are told: of what is unused, kept aside, or idle. It never steps.

It is near the wall clock, and goes on while the machine sleeps (CLOCK_BOOTTIME, clock_gettime(2)).
A wall clock that is set forward must not make what is fresh old, nor one that is set back keep what
is old for ever. So the wall clock counts once in each boot, at the first start of the pool: how
long nobody served it only that clock can say. It is not believed if it is behind what was seen
before. Every server of the same boot goes on from there, by a number in RUN.

Times that clients see are those of the wall clock, and are no measure of an age.
"""

import time
from typing import Final

#: Some years beyond 2100: a time above this is none.
_LATEST_NS: Final = 1 << 62


class AgeClock:
    """The clock of one pool."""

    def __init__(self, base_ns: int) -> None:
        """*base_ns*: what it says when CLOCK_BOOTTIME is 0."""
        #: Kept for the next server of this boot.
        self.base_ns: Final = base_ns

    @classmethod
    def begun(cls, kept_base_ns: int | None, wall_ns: int, seen_ns: int) -> "AgeClock":
        """Return the clock of a server that starts now.

        *kept_base_ns*: that of the server before, in the same boot; else None. *wall_ns*: the time
        of day (since the epoch). *seen_ns*: the latest time of this clock that a file tells.
        """
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now_ns = wall_ns if kept_base_ns is None else kept_base_ns + since_boot_ns
        if seen_ns < _LATEST_NS:
            now_ns = max(now_ns, seen_ns)
        return cls(min(now_ns, _LATEST_NS) - since_boot_ns)

    def now_ns(self) -> int:
        """Return the time in ns, about since the epoch."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self.base_ns
