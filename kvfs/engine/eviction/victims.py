"""The plan of eviction: which blocks go next, found by a scan of the heat.

The plan is a hint. Whoever takes a victim from it checks it again, and calls ``refuse`` if it may
not be evicted.
"""

import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.core.eviction_policy import Columns
from kvfs.core.types import InodeNo
from kvfs.pool.pool import Pool

#: A scan of up to so many rows is short enough for the event loop, and needs no thread.
_INLINE_ROWS: Final = 16_384
#: How many refused victims, and for how long, are left out of the next plans.
_REFUSED_MAX: Final = 4096
_REFUSED_S: Final = 1.0

#: Returns inodes of the columns in the order of eviction, but none of the array (some thousands).
Choose = Callable[[Columns, NDArray[np.uint64]], NDArray[np.uint64]]


class Victims:
    """The present plan, a queue of victims, and the making of the next one."""

    def __init__(
        self,
        pool: Pool,
        *,
        barren_s: float,
        age_s: float = math.inf,
        forgotten: Callable[[], None] | None = None,
    ) -> None:
        """After a plan that found nothing, no other one begins for *barren_s*.

        A plan expires after *age_s*. *forgotten* is called when refused victims may be named again.
        """
        self._pool = pool
        self._barren_s = barren_s
        self._age_s = age_s
        self._forgotten = forgotten
        self._queue: deque[InodeNo] = deque()
        self._plan: NDArray[np.uint64] | None = None
        self._refused: dict[InodeNo, None] = {}
        self._refused_since_s = -math.inf
        self._barren_until_s = -math.inf
        self._taken_s = -math.inf
        #: The heat's clock when the plan began: a block touched since is not cold any more.
        self._stamp = 0
        #: Whether a scan runs in the thread.
        self.planning = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def takes_long(self) -> bool:
        """Whether a scan takes long, and runs in the thread."""
        return len(self._pool.heat) > _INLINE_ROWS

    def next(self) -> InodeNo | None:
        """Take the next victim that was not used since the plan was made."""
        touched = self._pool.heat.touched
        while self._queue:
            ino = self._queue.popleft()
            if touched(ino) < self._stamp:
                return ino
        return None

    def put_back(self, ino: InodeNo) -> None:
        """Let *ino* be the next victim again."""
        self._queue.appendleft(ino)

    def refuse(self, ino: InodeNo) -> None:
        """Leave *ino*, which may not go now, out of the next plans for a while."""
        self._refused[ino] = None

    def allow(self, ino: InodeNo) -> None:
        """Let the next plan name *ino*, which may be evicted now."""
        self._refused.pop(ino, None)

    def drop(self) -> None:
        """Forget the plan, because a new one would have other victims."""
        self._queue.clear()

    def drop_if_old(self) -> None:
        """Forget the plan if it has expired: its victims may have been used since."""
        if self._pool.monotonic_s() - self._taken_s > self._age_s:
            self.drop()

    def is_barren(self) -> bool:
        """Whether a plan found nothing so recently that no other one may begin."""
        return self._pool.monotonic_s() < self._barren_until_s

    def rest(self) -> None:
        """Begin no plan for ``barren_s``."""
        self._barren_until_s = self._pool.monotonic_s() + self._barren_s

    def search_anew(self) -> None:
        """Forget what earlier plans found, refused or did not find."""
        self._barren_until_s = -math.inf
        self._forget_refused()

    def replan(self, choose: Choose) -> bool:
        """Let *choose* find more victims; True if there are some now."""
        if self._plan is None and not self.planning and not self.is_barren():
            self._begin(choose)
        plan, self._plan = self._plan, None
        if plan is None:
            return False
        self._queue = deque(InodeNo(int(ino)) for ino in plan)
        self._taken_s = self._pool.monotonic_s()
        if not self._queue:
            self.rest()
        return bool(self._queue)

    def _begin(self, choose: Choose) -> None:
        now_s = self._pool.monotonic_s()
        if now_s - self._refused_since_s > _REFUSED_S or len(self._refused) > _REFUSED_MAX:
            self._forget_refused()
            self._refused_since_s = now_s
        self.drop()  # its victims are older than the new stamp
        heat = self._pool.heat
        but_not = np.fromiter(self._refused, np.uint64, len(self._refused))
        columns, self._stamp = heat.columns(), heat.stamp
        scan = functools.partial(choose, columns, but_not)
        if self.takes_long:
            self.planning = True
            self._pool.background.submit_long(functools.partial(self._in_the_thread, scan))
        else:
            self._plan = scan()

    def _in_the_thread(self, scan: Callable[[], NDArray[np.uint64]]) -> None:
        try:
            self._plan = scan()
        finally:
            self.planning = False

    def _forget_refused(self) -> None:
        self._refused.clear()
        if self._forgotten is not None:
            self._forgotten()
