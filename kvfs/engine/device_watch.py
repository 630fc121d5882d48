"""Whether the device below answers and still works, and how fast it wears; looked at at every tick.

A device that fails says so. Blocks that it fails to write or to read lose their names
(device_errors.py). If the file system has shut itself down, the device is lost. Then the index must
not be used any more: it is a mapping, and a page that is not in memory raises SIGBUS.

A device that hangs says nothing: whoever calls it waits in the kernel. So a thread of its own reads
a little now and then (``DeviceProbe``), and the time for which its call has not come back tells
what the device is: serving, slow or silent.
"""

import contextlib
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvfs.core.pool_layout import INODES
from kvfs.core.types import PAGE_BYTES, DeviceState
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.recovery.device_errors import Unreadable, WriteBack
from kvfs.machine.hardware import endurance_left, is_short_of_cpu, written_bytes
from kvfs.machine.kernel_log import KernelLog
from kvfs.pool.pool import Pool
from kvfs.storage.background import Aside
from kvfs.storage.direct_open import open_direct
from kvfs.storage.index_map import STATE
from kvfs.storage.run_state import distrust_index
from kvfs.storage.syscalls import Syscalls

#: Time between two looks at the counter, and the time that the rate covers.
_LOOK_S: Final = 5.0
_RATE_S: Final = 60.0
#: How often the drive is asked, since it wears in months; and the first time, after the start.
_ASK_S: Final = 3600.0
_FIRST_ASK_S: Final = 10.0
_log: Final = logging.getLogger(__name__)
#: From the end of a probe to the next one.
_PAUSE_S: Final = 2.0
#: Each probe reads. Every so many also sync: a drive may read from its memory and still not write.
_SYNC_EVERY: Final = 5
#: A device that takes longer for one block is slow: a drive answers in milliseconds, a busy disk in
#: tenths of a second.
_SLOW_S: Final = 1.0
#: While requests wait, a device that has not answered for so many times as long as the last time,
#: but at least for this long, is suspect.
_SUSPECT_TIMES: Final = 8
_SUSPECT_S: Final = 0.7
#: Where CPUs are short it is suspect only after this: the kernel's threads below a loop device, an
#: NVMe target or dm-crypt wait for a CPU as the server does.
_SUSPECT_SHORT_S: Final = 2.5
#: At most so much of the time between two looks counts. If more has passed, this process was held
#: up itself (a busy machine, a paused container), and so perhaps was the thread that asks.
_LOOK_MAX_S: Final = 1.0


class DeviceProbe:
    """The probe of one pool's device. ``run_due`` and ``describe`` never wait for it."""

    def __init__(
        self,
        pool_fd: int,
        silent_s: float,
        monotonic_s: Callable[[], float],
        syscalls: Syscalls,
        is_short: Callable[[], bool] = is_short_of_cpu,
    ) -> None:
        """*pool_fd* is the pool's directory; the device is silent after *silent_s*.

        *is_short*: whether the machine lacks CPUs. Raises OSError.
        """
        self._is_short = is_short
        #: Open as long as the store: without a free descriptor the device would not be asked.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = open_direct(lambda direct: syscalls.open(INODES, flags | direct, dir_fd=pool_fd))
        self._silent_s = silent_s
        self._monotonic_s = monotonic_s
        self._syscalls = syscalls
        self._asking: Aside[float] = Aside("kvfs-probe")
        self._asked = 0
        self._asked_at_s = self._looked_s = 0.0
        #: For how long the probe under way has waited, as of the last look.
        self._waited_s = 0.0
        #: When the next probe is due; 0: at once.
        self._next_s = 0.0
        #: How long the last probe that has come back took.
        self._took_s = 0.0
        #: Whether the log says that the device is silent.
        self._told = False

    def run_due(self, now_s: float) -> None:
        """Take the answer of the probe under way, or begin the next one."""
        waited_s = self._waited_s = self._waited_at(now_s)
        self._looked_s = now_s
        came_back_s = self._asking.pop_result()
        if came_back_s is not None:
            self._took_s, self._waited_s = min(came_back_s - self._asked_at_s, waited_s), 0.0
            self._next_s = now_s + _PAUSE_S
            if self._told:
                self._told = False
                _log.warning("the device answers again, after %.1f s", self._took_s)
        elif self._asking.busy:
            if waited_s >= self._silent_s and not self._told:
                self._told = True
                _log.error(
                    "the device has not answered for %.1f s: what needs it waits in the kernel, "
                    "and goes on when it answers",
                    waited_s,
                )
        elif now_s >= self._next_s:
            self._asked += 1
            self._asked_at_s = now_s
            syncs = self._asked % _SYNC_EVERY == 0
            self._asking.start(lambda: self._ask(syncs=syncs))

    def _ask(self, *, syncs: bool) -> float:
        """Read a block from the device, in a thread; return when that was done.

        An error is an answer, too: other checks find out what it means.
        """
        with contextlib.suppress(OSError):
            self._read(syncs=syncs)
        return self._monotonic_s()

    def _read(self, *, syncs: bool) -> None:
        # Aligned, and not shorter than the sector of any drive: O_DIRECT refuses all else with
        # EINVAL, which the drive is not asked for.
        with mmap.mmap(-1, PAGE_BYTES) as buffer:
            self._syscalls.preadv(self._fd, [buffer], 0)
        if syncs:
            self._syscalls.fdatasync(self._fd)

    def hurry(self) -> None:
        """Begin the next probe at the next tick, because requests wait for the device."""
        self._next_s = 0.0

    @property
    def is_suspect(self) -> bool:
        """Whether the device may be silent: stores should not wait for it any more.

        A busy device that answers late each time is not suspect for that.
        """
        waited_s = self._waited_at(self._monotonic_s())
        usual_s = max(_SUSPECT_S, _SUSPECT_TIMES * self._took_s)
        if waited_s < min(usual_s, self._silent_s):
            return False
        return waited_s >= min(_SUSPECT_SHORT_S, self._silent_s) or not self._is_short()

    @property
    def is_waiting(self) -> bool:
        """Whether a probe is under way."""
        return self._asking.busy

    @property
    def state(self) -> DeviceState:
        """How the device answers, by the probe under way or else by the last one."""
        return self._state_at(self._waited_at(self._monotonic_s()))

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered for ``device_silent_s``."""
        return self.state is DeviceState.SILENT

    @property
    def is_slow(self) -> bool:
        """Whether it is slow, or worse."""
        return self.state is not DeviceState.SERVING

    def _state_at(self, waited_s: float) -> DeviceState:
        if waited_s >= self._silent_s:
            return DeviceState.SILENT
        is_slow = max(waited_s, self._took_s) >= _SLOW_S
        return DeviceState.SLOW if is_slow else DeviceState.SERVING

    def _waited_at(self, now_s: float) -> float:
        """Return for how long the probe under way has waited; 0 without one."""
        if not self._asking.busy:
            return 0.0
        return self._waited_s + min(now_s - self._looked_s, _LOOK_MAX_S)

    def describe(self) -> dict[str, Any]:
        """Return the state, and for how long a silent device has not answered, in s; else 0."""
        waited_s = self._waited_at(self._monotonic_s())
        state = self._state_at(waited_s)
        silent_s = waited_s if state is DeviceState.SILENT else 0.0
        return {"device_state": state.value, "device_silent_s": round(silent_s, 1)}

    def close(self) -> None:
        """Wait for the probe under way, which uses the pool's file system."""
        self._asking.join()
        os.close(self._fd)


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
