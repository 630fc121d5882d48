"""Drives that are being emptied (`kvfs drive drain`): nothing is copied, and nothing new put there.

What a drive holds is evicted in the one order of the pool, some blocks at a time beside the
requests. What must stay (pinned, leased, open) stays until it need not. That a drive is draining
stands in its own header, so that it holds after a kill, an upgrade and a remount, and whatever
becomes of the index.
"""

import logging
from typing import Final

from kvfs.core.changed import Reason
from kvfs.core.errors import DriveNeeded, UsageError
from kvfs.core.records import DriveCount
from kvfs.core.sizes import count_of, format_size
from kvfs.core.types import FIRST_DRIVE, DeviceState, DriveNo
from kvfs.devices.pool_files import PoolHeader, write_header
from kvfs.engine.eviction.reclaim import BATCH, Reclaim
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive

_log: Final = logging.getLogger(__name__)

#: From the end of a step to the next one: some 3 ms of 100, and 300 blocks a second.
_PAUSE_S: Final = 0.1
#: No step while so many extents of the drive wait to be unlinked: it would only make them more.
_UNLINKS_MOST: Final = 2 * BATCH


class Drains:
    """Which drives are being emptied; evicts what they hold, a step at a time."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool: Final = pool
        self._reclaim: Final = reclaim
        self._next_s = 0.0

    def drive(self, number: int) -> PoolDrive:
        """Return the drive with this number. Raises UsageError."""
        drives = self._pool.space.drives.all
        if not 0 <= number < len(drives):
            raise UsageError(f"there is no drive {number}; the pool has 0 to {len(drives) - 1}")
        if drives[number].is_removed:
            raise UsageError(f"there is no drive {number} any more: it was removed")
        return drives[number]

    def left(self, drive: PoolDrive) -> DriveCount:
        """Return what blocks hold of *drive*."""
        return self._pool.drive_counts.of_all(self._pool.counters)[drive.number]

    def require_spared(self, drive: PoolDrive) -> None:
        """Raise DriveNeeded unless another drive than *drive* takes new blocks."""
        if drive.has_failed:
            raise DriveNeeded(f"drive {drive.number} has failed: {drive.probe.why_failed}")
        if drive.probe.state is DeviceState.SILENT:
            raise DriveNeeded(f"drive {drive.number} does not answer; try again when it does")
        others = (each for each in self._pool.space.serving if each is not drive)
        if all(each.is_draining for each in others):
            raise DriveNeeded(f"drive {drive.number} is the only one that takes blocks")

    def require_removable(self, drive: PoolDrive, *, now: bool) -> None:
        """Raise DriveNeeded unless *drive* may be removed, and is empty or *now* given up."""
        number = drive.number
        if number == FIRST_DRIVE and not drive.has_failed:
            raise DriveNeeded(
                "drive 0 has the files of directories, and cannot be removed unless it has failed "
                "or is missing: with `kvfs drive drain` it holds no blocks"
            )
        if not drive.has_failed:
            self.require_spared(drive)
        if self._pool.durable.index_log.is_only_on(drive):
            raise DriveNeeded(
                f"drive {number} alone has the log of the index; another gets it: try again soon"
            )
        left, space = self.left(drive), drive.space
        held_bytes = 0 if drive.has_failed else space.used_bytes + space.deleted_open_bytes
        if now or not (left.blocks or held_bytes):
            return
        what = count_of(left.blocks, "block") if left.blocks else "blocks that are open"
        raise DriveNeeded(
            f"drive {number} holds {what}, {format_size(max(left.used_bytes, held_bytes))}: first "
            "empty it with `kvfs drive drain`, or give them up with --now"
        )

    def write(self, drive: PoolDrive, *, draining: bool) -> PoolHeader:
        """Have the header of *drive* say whether it is *draining*; in any thread. Raises OSError.

        Return it, for ``begin`` or ``end``, which must come after.
        """
        device = self._pool.device.drives[drive.number]
        several = device.header.several
        assert several is not None, "a pool of one drive has none to spare"
        header = device.header._replace(several=several._replace(draining=draining))
        write_header(device.pool_fd, header)
        return header

    def learn(self, drive: PoolDrive, header: PoolHeader) -> None:
        """From now on *drive* is draining or not, as its *header* says."""
        self._pool.device.drives[drive.number].header = header
        if header.is_draining == drive.is_draining:
            return
        drive.is_draining = header.is_draining
        left = self.left(drive)
        if not drive.is_draining:
            _log.info("drive %d takes blocks again", drive.number)
            return
        _log.info("drive %d takes no more blocks, and its %d go", drive.number, left.blocks)
        self._pool.open.ready.on(drive).give_up()

    def run_due(self, now_s: float) -> None:
        """Evict some blocks of each drive that is draining."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _PAUSE_S
        for drive in self._pool.space.serving:
            if drive.is_draining and len(drive.unlink_queue) < _UNLINKS_MOST:
                self._evict_some(drive)

    def _evict_some(self, drive: PoolDrive) -> None:
        left = self.left(drive)
        if left.blocks <= 0:
            return
        some_bytes = max(1, BATCH * left.used_bytes // left.blocks)
        self._reclaim.evict(some_bytes, drive, reason=Reason.COMMAND)


def number_of(said: object) -> DriveNo:
    """Return the number of a drive that a client *said*. Raises UsageError."""
    if not isinstance(said, int) or isinstance(said, bool):
        raise UsageError("drive: must be the number of a drive")
    return DriveNo(said)
