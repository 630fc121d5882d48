"""Whether the device below still works; checked at every tick.

What it fails to write and to read is dismissed (write_back.py, unreadable.py). A file system that
has shut itself down is the end: then nobody may look at the index any more, whose pages are a
mapping of it (SIGBUS for whoever touches one that is not in memory).
"""

import contextlib
import os

from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.recovery.unreadable import Unreadable
from kvfs.engine.recovery.write_back import WriteBack
from kvfs.machine.kernel_log import KernelLog
from kvfs.pool.pool import Pool
from kvfs.storage.index_map import STATE
from kvfs.storage.run_state import distrust_index


class DeviceWatch:
    """The looks at one pool's device."""

    def __init__(self, pool: Pool, publishing: Publishing) -> None:
        self._pool = pool
        self._log = KernelLog(pool.device.pool_fd)
        self.write_back = WriteBack(pool, publishing)
        self._unreadable = Unreadable(pool, publishing)
        #: Why the pool cannot be used any more, for good; empty while it can.
        self.lost = ""
        pool.ends_first(self.close)

    def tick(self, now_s: float) -> None:
        """Look; 3 us while nothing is wrong."""
        if not self.lost and (why := self._why_lost()):
            self.lost = why
            with contextlib.suppress(OSError):  # then its log is dirty, which says the same
                distrust_index(self._pool.device.pool_fd, self._pool.syscalls)
        if self.lost:
            return
        errors = self._log.errors()
        if errors.reads:
            self._unreadable.suspect(now_s)
        if errors.writes:
            self.write_back.hint()
        self.write_back.tick(now_s)
        self._unreadable.tick(now_s)

    def _why_lost(self) -> str:
        """Return what a file system says that was shut down: XFS fails its statfs at once."""
        try:
            os.fstatvfs(self._pool.device.pool_fd)
        except OSError as error:
            return f"its file system has failed: {error.strerror}"
        if STATE.lost:
            return "pages of its index cannot be read"
        return self.write_back.index_error

    def close(self) -> None:
        """Look no more; waits for what is under way."""
        self._unreadable.close()
        self.write_back.close()
        self._log.close()
