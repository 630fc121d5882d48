"""Strays in their grace time: they are kept because they may have lost their names by an error.

Their space counts as taken, and is the first to be freed when the pool needs it. Times are
arguments, in ns since the epoch, because a grace time outlives a restart.
"""

import functools
import logging
from collections import OrderedDict
from typing import Final

from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.pool.space import Space
from kvfs.pool.unlink_queue import UnlinkQueue
from kvfs.storage.stray_files import Stray, StrayFiles

_log: Final = logging.getLogger(__name__)


class Strays:
    """The strays of one pool, oldest first."""

    def __init__(
        self,
        files: StrayFiles,
        space: Space,
        unlink_queue: UnlinkQueue,
        *,
        grace_s: float,
        most: int,
    ) -> None:
        """*most*: how many files are kept at once; for one more the oldest is removed."""
        self._files = files
        self._space = space
        self._unlink_queue = unlink_queue
        self._grace_ns = int(grace_s * SECOND_NS)
        self._most = most if grace_s > 0 else 0
        self._kept: OrderedDict[InodeNo, Stray] = OrderedDict()
        #: How many were removed because their space was needed, or there were too many.
        self.gave_way = 0

    @property
    def keeps(self) -> bool:
        """Whether strays are kept at all."""
        return self._most > 0

    def load(self) -> None:
        """Read what former servers kept; an error is logged, and does not refuse the start."""
        try:
            held = self._files.held()
        except OSError as error:
            _log.warning("the strays cannot be read: %s", error)
            return
        for stray in held:
            self.add(stray)

    def take(self, ino: InodeNo, now_ns: int, *, of_node: bool) -> Stray | None:
        """Move the file of *ino* aside, in any thread; pass the result to ``add``."""
        return self._files.take(ino, now_ns, of_node=of_node)

    def add(self, stray: Stray) -> None:
        """Keep *stray* until its grace ends."""
        self._kept[stray.ino] = stray
        self._space.stray_bytes += stray.size_bytes
        while len(self._kept) > self._most:
            self.gave_way += 1
            self._remove_oldest()

    def tick(self, now_ns: int) -> None:
        """Remove strays whose grace is over. One dated in the future counts from now on."""
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.since_ns > now_ns:
                self._kept[oldest.ino] = oldest._replace(since_ns=now_ns)
                return
            if now_ns - oldest.since_ns < self._grace_ns:
                return
            self._remove_oldest()

    def give_way(self, size_bytes: int) -> int:
        """Remove the oldest until *size_bytes* are being freed; return the bytes being freed."""
        freed_bytes = 0
        while self._kept and freed_bytes < size_bytes:
            self.gave_way += 1
            freed_bytes += self._remove_oldest()
        return freed_bytes

    def _remove_oldest(self) -> int:
        ino, stray = self._kept.popitem(last=False)
        self._space.stray_bytes -= stray.size_bytes
        self._unlink_queue.add(functools.partial(self._files.remove, ino), stray.size_bytes)
        return stray.size_bytes

    def describe(self, now_ns: int) -> dict[str, int | float]:
        """Return the figures `kvfs status` shows."""
        oldest = next(iter(self._kept.values()), None)
        age_ns = 0 if oldest is None else max(0, now_ns - oldest.since_ns)
        return {
            "files": len(self._kept),
            "bytes": self._space.stray_bytes,
            "oldest_s": age_ns // SECOND_NS,
            "gave_way": self.gave_way,
        }
