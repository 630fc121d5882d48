"""Inodes that lost their name a moment ago and can still be opened.

Another client may replace a name between a LOOKUP and its OPEN. A local file system then opens the
old file. On kvfs the OPEN would find a dead inode, and the kernel retries only once. So a removed
inode keeps its record and its extent for a moment. Time, number and bytes are bounded.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.space.space import Space

#: A LOOKUP and its OPEN are microseconds apart, or perhaps 100 ms if CPU is short.
REMOVED_KEPT_S: Final = 1.0
#: Most inodes that are kept; if there are more, the oldest are erased.
REMOVED_MAX: Final = 4096
#: The share of the capacity that removed blocks may keep.
_SHARE: Final = 1 / 64


class _Removed(NamedTuple):
    record: InodeRecord
    due_s: float


class RecentlyRemoved:
    """Recently removed inodes, oldest first; their bytes count as used until they are erased."""

    def __init__(self, space: Space, erase: Callable[[InodeNo, InodeRecord], None]) -> None:
        self._space = space
        self._erase = erase
        self._removed: OrderedDict[InodeNo, _Removed] = OrderedDict()
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._removed)

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._removed

    def keep(self, ino: InodeNo, record: InodeRecord, now_s: float) -> None:
        """Keep *ino* with *record*. The caller has added its bytes to ``Space.extra_bytes``."""
        self._removed[ino] = _Removed(record, now_s + REMOVED_KEPT_S)
        self._held_bytes += record.allocated_bytes
        bound_bytes = self._space.capacity_bytes * _SHARE
        while self._removed and (
            len(self._removed) > REMOVED_MAX or self._held_bytes > bound_bytes
        ):
            self._erase_oldest()

    @property
    def held_bytes(self) -> int:
        """Bytes that are freed as soon as they are needed."""
        return self._held_bytes

    def record(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino* if it was removed a moment ago."""
        removed = self._removed.get(ino)
        return None if removed is None else removed.record

    def take_back(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino*, and stop keeping it: it is open now. None if not kept."""
        removed = self._removed.pop(ino, None)
        if removed is None:
            return None
        self._held_bytes -= removed.record.allocated_bytes
        return removed.record

    def tick(self, now_s: float) -> None:
        """Erase inodes whose time is over."""
        while self._removed and next(iter(self._removed.values())).due_s <= now_s:
            self._erase_oldest()

    def give_way(self) -> None:
        """Erase all, because their space is needed or the pool stops."""
        while self._removed:
            self._erase_oldest()

    def _erase_oldest(self) -> None:
        ino, removed = self._removed.popitem(last=False)
        self._held_bytes -= removed.record.allocated_bytes
        self._space.extra_bytes -= removed.record.allocated_bytes
        self._erase(ino, removed.record)
