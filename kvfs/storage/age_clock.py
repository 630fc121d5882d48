"""The clock for ages: how long something was unused, kept aside, or idle. It never steps.

It is near the wall clock, and goes on while the machine sleeps (CLOCK_BOOTTIME, clock_gettime(2)).
Setting the wall clock forward must not make fresh blocks old; setting it back must not keep old
ones for ever. So the wall clock is read once per boot, at the first start of the pool, because only
it can tell how long the pool was not served. It is ignored if it is behind a time seen before.
Later servers of the same boot continue from there, by a number in RUN.

Times that clients see come from the wall clock, and are no measure of an age.
"""

import time
from typing import Final

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
