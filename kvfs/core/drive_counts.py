"""What of a pool is on which of its drives, as the index counts it. Pure.

The counters are of the whole pool. Each drive from 1 on has a row of its own beside them, and the
first drive has the rest: so the rows of a pool of one drive are what they always were.
"""

import stat
from collections.abc import Iterable, Sequence
from typing import Final

from kvfs.core.changed import Changed
from kvfs.core.drives import Numbering
from kvfs.core.records import Counters, DriveCount
from kvfs.core.types import FIRST_DRIVE, DriveNo, InodeNo, InodeRecord

#: The new counts of drives from 1 on that a change touches.
Recount = dict[DriveNo, DriveCount]


class DriveCounts:
    """The counts of a pool's drives. Followed change by change, or counted inode by inode."""

    def __init__(self, others: Sequence[DriveCount]) -> None:
        """*others*: the counts of the drives from 1 on, by number."""
        self._drive: Final = Numbering(1 + len(others)).drive
        self._counts = [DriveCount(), *others]
        #: Whether there are drives from 1 on.
        self.several: Final = bool(others)

    def rows(self) -> Recount:
        """Return what the rows of the drives from 1 on are to say."""
        return {DriveNo(at): count for at, count in enumerate(self._counts) if at}

    def of_all(self, counters: Counters) -> list[DriveCount]:
        """Return the counts of all drives, by number, of a pool with *counters*."""
        others = self._counts[1:]
        blocks = counters.blocks - sum(count.blocks for count in others)
        used_bytes = counters.used_bytes - sum(count.used_bytes for count in others)
        return [DriveCount(blocks, used_bytes), *others]

    def after(self, changes: Iterable[Changed]) -> Recount:
        """Return the new counts of the drives that *changes* touch; nothing changes here yet."""
        recount: Recount = {}
        for changed in changes:
            drive = self._drive(changed.ino)
            if drive == FIRST_DRIVE or drive >= len(self._counts):
                continue
            count = recount.get(drive, self._counts[drive])
            count = _counted(count, changed.before, -1)
            recount[drive] = _counted(count, changed.after, 1)
        return recount

    def count(self, ino: InodeNo, record: InodeRecord) -> None:
        """Count one more inode: for who counts from scratch."""
        drive = self._drive(ino)
        if FIRST_DRIVE < drive < len(self._counts):
            self._counts[drive] = _counted(self._counts[drive], record, 1)

    def learn(self, recount: Recount) -> None:
        """Let the counts be those that ``after`` returned: they are in the index."""
        for drive, count in recount.items():
            self._counts[drive] = count


def _counted(count: DriveCount, record: InodeRecord | None, step: int) -> DriveCount:
    if record is None or not stat.S_ISREG(record.mode):
        return count
    used_bytes = count.used_bytes + step * record.allocated_bytes
    return DriveCount(count.blocks + step, used_bytes)
