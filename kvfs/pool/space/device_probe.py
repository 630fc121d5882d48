"""Whether a drive answers: a thread of its own reads a little now and then.

A device that hangs says nothing: whoever calls it waits in the kernel. So the time for which the
call of that thread has not come back tells what the drive is: serving, slow or silent.

An error is an answer, and one read that fails says nothing of the next. But a drive whose reads go
on failing, or whose writes have failed, is asked to write; if that fails again and again as well,
the drive is gone. So it is if the kernel has no such device any more.
"""

import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvfs.core.pool_layout import INODES
from kvfs.core.types import PAGE_BYTES, DeviceState
from kvfs.machine.hardware import has_block_device, is_short_of_cpu, wants_cpu
from kvfs.storage.background import Aside
from kvfs.storage.direct_open import open_direct
from kvfs.storage.syscalls import Syscalls

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
#: What a device says that is not there, or does nothing any more.
_GONE: Final = frozenset({errno.EIO, errno.ENODEV, errno.ENXIO})
#: From a probe that failed to the next one.
_RETRY_S: Final = 0.5
#: After so many probes in a row whose read failed the next ones write, too; and after so many that
#: failed in all the drive is gone: some 3 s, as a link may be lost and come back.
_READS_FAIL: Final = 3
_ALL_FAIL: Final = 6


class _Answer(NamedTuple):
    """What one probe found: when it came back, and how reads and writes failed (errno)."""

    at_s: float
    read_error: int = 0
    #: 0 as well if no write was tried.
    write_error: int = 0
    wrote: bool = False
    is_there: bool = True

    @property
    def why(self) -> str:
        """Why the drive may be gone, or ""."""
        found = (("reads", self.read_error), ("writes", self.write_error))
        return " and ".join(
            f"its {what} fail: {os.strerror(error)}" for what, error in found if error in _GONE
        )


class DeviceProbe:
    """The probe of one drive. ``run_due`` never waits for it."""

    def __init__(
        self,
        pool_fd: int,
        silent_s: float,
        monotonic_s: Callable[[], float],
        syscalls: Syscalls,
        is_short: Callable[[], bool] = is_short_of_cpu,
        name: str = "the device",
        wants_cpu: Callable[[int], bool] = wants_cpu,
        *,
        writes: bool = False,
        is_there: Callable[[], bool] | None = None,
    ) -> None:
        """*pool_fd* is the pool's directory; the device is silent after *silent_s*.

        *is_short*: whether the machine lacks CPUs. *name*: for the log. *wants_cpu*: whether a
        thread waits for a CPU, and so for no device. *writes*: whether it may be asked to write.
        *is_there*: whether the kernel has the device, if it ever had one. Raises OSError.
        """
        self._pool_fd = pool_fd
        self._writes = writes
        self._is_there = is_there or block_device_of(pool_fd)
        self._wants_cpu = wants_cpu
        self._name = name
        self._is_short = is_short
        #: Open as long as the store: without a free descriptor the device would not be asked.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = open_direct(lambda direct: syscalls.open(INODES, flags | direct, dir_fd=pool_fd))
        self._silent_s = silent_s
        self._monotonic_s = monotonic_s
        self._syscalls = syscalls
        self._asking: Aside[_Answer] = Aside("kvfs-probe")
        #: How many probes in a row have failed; and whether a write has failed since the last that
        #: did not.
        self._failed = 0
        self._is_doubted = False
        #: Why the drive seems to be gone; empty while it does not.
        self.why_gone = ""
        self._asked = 0
        self._asked_at_s = self._looked_s = 0.0
        #: For how long the probe under way has waited, as of the last look.
        self._waited_s = 0.0
        #: When the next probe is due; 0: at once.
        self._next_s = 0.0
        #: How long the last probe that has come back took, in s.
        self.took_s = 0.0
        self._slowest_s = 0.0
        #: Why the drive can never be used again; empty while it can.
        self.why_failed = ""
        #: What it is then.
        self._ended_as = DeviceState.FAILED
        #: Whether the log says that the device is silent.
        self._told = False

    def run_due(self, now_s: float) -> None:
        """Take the answer of the probe under way, or begin the next one."""
        if self.why_failed:
            return
        waited_s = self._waited_s = self._waited_at(now_s)
        self._looked_s = now_s
        answer = self._asking.pop_result()
        if answer is not None:
            self.took_s, self._waited_s = min(answer.at_s - self._asked_at_s, waited_s), 0.0
            self._judge(answer)
            self._next_s = now_s + (_RETRY_S if self._failed else _PAUSE_S)
            self._slowest_s = max(self._slowest_s, self.took_s)
            if self._told:
                self._told = False
                _log.warning("%s answers again, after %.1f s", self._name, self.took_s)
        elif self._asking.busy:
            if waited_s >= self._silent_s and not self._told:
                self._told = True
                _log.error(
                    "%s has not answered for %.1f s: what needs it waits in the kernel, "
                    "and goes on when it answers",
                    self._name,
                    waited_s,
                )
        elif now_s >= self._next_s:
            self._asked += 1
            self._asked_at_s = now_s
            syncs = self._asked % _SYNC_EVERY == 0
            writes = self._writes and (self._is_doubted or self._failed >= _READS_FAIL)
            self._asking.start(lambda: self._ask(syncs=syncs, writes=writes))

    def _ask(self, *, syncs: bool, writes: bool) -> _Answer:
        """Read a block from the device, in a thread; *writes*: and write one."""
        read_error = _error_of(lambda: self._read(syncs=syncs))
        write_error = _error_of(self._write) if writes else 0
        there = self._is_there()
        return _Answer(self._monotonic_s(), read_error, write_error, writes, is_there=there)

    def _judge(self, answer: _Answer) -> None:
        """Note whether the drive works, fails or is gone, as *answer* says."""
        if not answer.is_there:
            self.why_gone = "the kernel has no such device any more"
        works = not answer.why or (answer.wrote and answer.write_error not in _GONE)
        self._failed = 0 if works else self._failed + 1
        self._is_doubted &= not (answer.wrote and works)
        if self._failed >= _ALL_FAIL and answer.write_error:
            self.why_gone = answer.why

    def doubt(self) -> None:
        """Have the drive asked to write, since something that it was to write has failed."""
        self._is_doubted = True
        self.hurry()

    def _write(self) -> None:
        """Write a page to the drive, in a file without a name, and wait until it has it."""
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        fd = self._syscalls.open(".", flags, 0o600, dir_fd=self._pool_fd)
        try:
            self._syscalls.pwrite(fd, bytes(PAGE_BYTES), 0)
            self._syscalls.fsync(fd)
        finally:
            self._syscalls.close(fd)

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
        if self.why_failed:
            return False  # all calls return at once
        usual_s = max(_SUSPECT_S, _SUSPECT_TIMES * self.took_s)
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
    def slowest_s(self) -> float:
        """How long the slowest probe since the start took, or the one under way has waited."""
        return max(self._slowest_s, self._waited_at(self._monotonic_s()))

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered for ``device_silent_s``."""
        return self.state is DeviceState.SILENT

    @property
    def is_slow(self) -> bool:
        """Whether it answers not at all, or later than it should; or has failed."""
        return self.state is not DeviceState.SERVING

    @property
    def takes_blocks(self) -> bool:
        """Whether new blocks may be put there: it is not slow or failed, nor seems silent."""
        return not (self.is_slow or self.is_suspect)

    def give_up(self, why: str, ended_as: DeviceState = DeviceState.FAILED) -> None:
        """Ask no more: the drive has failed, or is missing, because of *why*."""
        self.why_failed, self._ended_as = why, ended_as

    def _state_at(self, waited_s: float) -> DeviceState:
        if self.why_failed:
            return self._ended_as
        if waited_s >= self._silent_s:
            return DeviceState.SILENT
        is_slow = max(waited_s, self.took_s) >= _SLOW_S
        return DeviceState.SLOW if is_slow else DeviceState.SERVING

    def _waited_at(self, now_s: float) -> float:
        """Return for how long the probe under way has waited; 0 without one.

        Since the last look it has not, if its thread waits for a CPU now: the device has answered,
        or was not asked yet.
        """
        if (thread_id := self._asking.thread_id) is None:
            return 0.0
        if self._wants_cpu(thread_id):
            return self._waited_s
        return self._waited_s + min(now_s - self._looked_s, _LOOK_MAX_S)

    @property
    def silent_s(self) -> float:
        """For how long a silent device has not answered, in s; else 0."""
        waited_s = self._waited_at(self._monotonic_s())
        return waited_s if self._state_at(waited_s) is DeviceState.SILENT else 0.0

    def close(self) -> None:
        """Wait for the probe under way, which uses the pool's file system."""
        self._asking.join()
        os.close(self._fd)


def block_device_of(pool_fd: int) -> Callable[[], bool]:
    """Return what tells whether the kernel has the block device of *pool_fd*'s file system still.

    One that it does not know by its number is always there: on btrfs, say, or in memory.
    """
    device = os.fstat(pool_fd).st_dev
    known = has_block_device(device)
    return lambda: not known or has_block_device(device)


def _error_of(call: Callable[[], None]) -> int:
    """Return the errno of an error that *call* raises; 0 if there is none."""
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def worst_answer(probes: Sequence[DeviceProbe]) -> dict[str, Any]:
    """Return the state of the drive that answers worst, and how long one has not answered, in s."""
    states, silent_s = {probe.state for probe in probes}, max(probe.silent_s for probe in probes)
    worst = max(states, key=list(DeviceState).index)
    return {"device_state": worst.value, "device_silent_s": round(silent_s, 1)}
