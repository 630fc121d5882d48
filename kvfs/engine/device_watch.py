"""Whether the drives below still work; looked at at every tick.

A device that fails says so. Blocks that it fails to write or to read lose their names
(device_errors.py). If the file system has shut itself down, the device is lost. Then the index must
not be used any more: it is a mapping, and a page that is not in memory raises SIGBUS. A device that
hangs says nothing: its probe finds out (kvfs/pool/space/device_probe.py).
"""

import contextlib
from typing import Final

from kvfs.core.types import FIRST_DRIVE
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.recovery.device_errors import Unreadable, WriteBack
from kvfs.engine.recovery.lost_drives import LostDrives
from kvfs.machine.kernel_log import KernelLog
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.index_map import STATE
from kvfs.storage.run_state import distrust_index


class DriveWatch:
    """The checks of one drive."""

    def __init__(self, pool: Pool, publishing: Publishing, drive: PoolDrive) -> None:
        self.drive: Final = drive
        self._pool_fd = pool.device.pool_fds[drive.number]
        self._syscalls = pool.syscalls
        self._log = KernelLog(pool.device.pool_fds[drive.number])
        self._probe = drive.probe
        self.write_back = WriteBack(pool, publishing, drive)
        self._unreadable = Unreadable(pool, publishing, drive)

    def why_failed(self) -> str:
        """Return why the drive can never be used again, or ""."""
        try:
            self._syscalls.check_alive(self._pool_fd)
        except OSError as error:
            return f"its file system has failed: {error.strerror}"
        return ""

    def run_due(self, now_s: float) -> None:
        """Check the drive."""
        errors = self._log.errors()
        if errors.reads:
            self._unreadable.suspect(now_s)
        if errors.writes:
            self.write_back.hint()
        self.write_back.run_due(now_s)
        self._unreadable.run_due(now_s)
        self._probe.run_due(now_s)

    def close(self) -> None:
        """End the checks; wait for the one under way."""
        self._unreadable.close()
        self.write_back.close()
        self._log.close()


class DeviceWatch:
    """The checks of one pool's drives. If the first fails, which has the index, all is lost."""

    def __init__(self, pool: Pool, publishing: Publishing, lost_drives: LostDrives) -> None:
        self._pool = pool
        self._lost_drives = lost_drives
        self.drives: Final = [DriveWatch(pool, publishing, each) for each in pool.space.drives.all]
        #: Why the pool can never be used again; empty while it works.
        self.lost = ""
        pool.ends_first(self.close)

    def run_due(self, now_s: float) -> None:
        """Check the drives; takes 3 us for each while nothing is wrong."""
        if not self.lost and (why := self._why_lost()):
            self.lost = why
            with contextlib.suppress(OSError):  # if it fails, XFS's dirty log says the same
                distrust_index(self._pool.device.pool_fd, self._pool.syscalls)
        if self.lost:
            return
        for watch in self._serving():
            if watch.drive.number != FIRST_DRIVE and (why := watch.why_failed()):
                self._lost_drives.give_up(watch.drive, why)
            else:
                watch.run_due(now_s)

    def _serving(self) -> list[DriveWatch]:
        return [watch for watch in self.drives if not watch.drive.has_failed]

    @property
    def failures(self) -> int:
        """How often a look found that a drive had failed to write."""
        return sum(drive.write_back.failures for drive in self.drives)

    def settle(self) -> bool:
        """Look at all drives before a stop (``WriteBack.settle``); whether the index is right."""
        settled = [watch.write_back.settle() for watch in self._serving()]
        return all(settled)

    def _why_lost(self) -> str:
        """Return why the pool is lost, or ""."""
        if why := self.drives[FIRST_DRIVE].why_failed():
            return why
        if STATE.lost:
            return "pages of its index cannot be read"
        return self.drives[FIRST_DRIVE].write_back.index_error

    def close(self) -> None:
        """End the checks; wait for those under way."""
        for drive in self.drives:
            drive.close()
