"""Whether the drives below still work; looked at at every tick.

A device that fails says so. Blocks that it fails to write or to read lose their names
(device_errors.py). If the file system has shut itself down, the device is lost. Then the index must
not be used any more: it is a mapping, and a page that is not in memory raises SIGBUS. A device that
hangs says nothing: its probe finds out (kvfs/pool/space/device_probe.py).
"""

import contextlib
import os
from typing import Final

from kvfs.core.types import FIRST_DRIVE
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.recovery.device_errors import Unreadable, WriteBack
from kvfs.machine.kernel_log import KernelLog
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.index_map import STATE
from kvfs.storage.run_state import distrust_index


class DriveWatch:
    """The checks of one drive."""

    def __init__(self, pool: Pool, publishing: Publishing, drive: PoolDrive) -> None:
        self._log = KernelLog(pool.device.pool_fds[drive.number])
        self._probe = drive.probe
        self.write_back = WriteBack(pool, publishing, drive)
        self._unreadable = Unreadable(pool, publishing, drive)

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
    """The checks of one pool's drives."""

    def __init__(self, pool: Pool, publishing: Publishing) -> None:
        self._pool = pool
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
        for drive in self.drives:
            drive.run_due(now_s)

    @property
    def failures(self) -> int:
        """How often a look found that a drive had failed to write."""
        return sum(drive.write_back.failures for drive in self.drives)

    def settle(self) -> bool:
        """Look at all drives before a stop (``WriteBack.settle``); whether the index is right."""
        settled = [drive.write_back.settle() for drive in self.drives]
        return all(settled)

    def _why_lost(self) -> str:
        """Return why the pool is lost, or "".

        Once XFS has shut itself down, fstat(2) fails at once, without the device
        (xfs_vn_getattr in fs/xfs/xfs_iops.c). On Linux 6.18 statfs(2) goes on to answer.
        """
        try:
            os.fstat(self._pool.device.pool_fd)
            os.fstatvfs(self._pool.device.pool_fd)
        except OSError as error:
            return f"its file system has failed: {error.strerror}"
        if STATE.lost:
            return "pages of its index cannot be read"
        return self.drives[FIRST_DRIVE].write_back.index_error

    def close(self) -> None:
        """End the checks; wait for those under way."""
        for drive in self.drives:
            drive.close()
