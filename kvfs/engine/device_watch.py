"""Whether the device below still works, and how fast it wears; looked at at every tick.

Whether it answers at all is found out by a thread of its own (device_probe.py).

Blocks that it fails to write or to read lose their names (device_errors.py). If the file system has
shut itself down, the device is lost. Then the index must not be used any more: it is a mapping, and
a page that is not in memory raises SIGBUS.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.device_probe import DeviceProbe
from kvfs.engine.recovery.device_errors import Unreadable, WriteBack
from kvfs.machine.hardware import endurance_left, written_bytes
from kvfs.machine.kernel_log import KernelLog
from kvfs.pool.pool import Pool
from kvfs.storage.index_map import STATE
from kvfs.storage.run_state import distrust_index

#: Time between two looks at the counter, and the time that the rate covers.
_LOOK_S: Final = 5.0
_RATE_S: Final = 60.0
#: How often the drive is asked, since it wears in months; and the first time, after the start.
_ASK_S: Final = 3600.0
_FIRST_ASK_S: Final = 10.0


class DeviceWear:
    """How fast a pool's device is written, and how much of its endurance is left.

    The counters of the kernel are read now and then. The drive itself is asked in a thread of its
    own: a failing one answers late or never, and neither requests nor other jobs may wait for it.
    """

    def __init__(
        self,
        pool_fd: int,
        written: Callable[[int], int | None] = written_bytes,
        ask: Callable[[int], float | None] = endurance_left,
    ) -> None:
        """*pool_fd* is the pool's directory. *written* and *ask* take a device number (st_dev), as
        in hardware.py.
        """
        self._device = os.fstat(pool_fd).st_dev
        self._written = written
        self._ask = ask
        #: Bytes written to the device before the server started; None: not known.
        self._before = written(self._device)
        #: When (s), and the counter then.
        self._looks: deque[tuple[float, int]] = deque()
        self._ask_at_s: float | None = None
        self._asking: threading.Thread | None = None
        self._left: float | None = None

    def run_due(self, now_s: float) -> None:
        """Look at the counter, or ask the drive, if that is due."""
        if self._before is not None and (not self._looks or now_s - self._looks[-1][0] >= _LOOK_S):
            now_bytes = self._written(self._device)
            if now_bytes is not None:
                self._looks.append((now_s, now_bytes))
            while len(self._looks) > 1 and now_s - self._looks[0][0] > _RATE_S:
                self._looks.popleft()
        # A drive that has not answered yet is not asked again.
        idle = self._asking is None or not self._asking.is_alive()
        if self._ask_at_s is None:
            self._ask_at_s = now_s + _FIRST_ASK_S
        elif idle and now_s >= self._ask_at_s:
            self._ask_at_s = now_s + _ASK_S
            self._asking = threading.Thread(target=self._ask_drive, name="kvfs-wear", daemon=True)
            self._asking.start()

    def _ask_drive(self) -> None:
        self._left = self._ask(self._device)

    def shown(self) -> dict[str, Any]:
        """Return the figures for `kvfs status`: bytes, bytes a second, a share; None: not known."""
        written = rate = None
        if self._looks and self._before is not None:
            (first_s, first_bytes), (last_s, last_bytes) = self._looks[0], self._looks[-1]
            written = last_bytes - self._before
            if last_s > first_s:
                rate = round((last_bytes - first_bytes) / (last_s - first_s), 1)
        return {"written_bytes": written, "write_rate": rate, "endurance_left": self._left}


class DeviceWatch:
    """The checks of one pool's device."""

    def __init__(self, pool: Pool, publishing: Publishing) -> None:
        self._pool = pool
        self._log = KernelLog(pool.device.pool_fd)
        self.write_back = WriteBack(pool, publishing)
        self._unreadable = Unreadable(pool, publishing)
        silent_s = pool.settings.device_silent_s
        self.probe = DeviceProbe(pool.device.pool_fd, silent_s, pool.monotonic_s, pool.syscalls)
        #: Why the pool can never be used again; empty while it works.
        self.lost = ""
        pool.ends_first(self.close)

    def run_due(self, now_s: float) -> None:
        """Check the device; takes 3 us while nothing is wrong."""
        if not self.lost and (why := self._why_lost()):
            self.lost = why
            with contextlib.suppress(OSError):  # if it fails, XFS's dirty log says the same
                distrust_index(self._pool.device.pool_fd, self._pool.syscalls)
        if self.lost:
            return
        errors = self._log.errors()
        if errors.reads:
            self._unreadable.suspect(now_s)
        if errors.writes:
            self.write_back.hint()
        self.write_back.run_due(now_s)
        self._unreadable.run_due(now_s)
        self.probe.run_due(now_s)

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
        return self.write_back.index_error

    def close(self) -> None:
        """End the checks; wait for the one under way."""
        self._unreadable.close()
        self.write_back.close()
        self.probe.close()
        self._log.close()
