"""What /proc says of a process: its status, how it ended, and what keeps it from ending.

How it ended may be "unknown".

Reading ``status`` and ``statm`` of a process never waits for it. Reading ``stat`` may: a process
inside execve(2) that closes its files holds a lock that ``stat`` waits for, and it waits for us. So
``stat`` is read only of processes that are past that, or in a thread of its own (``judge``).
"""

import fcntl
import os
import re
import signal
import struct
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from kvfs.core.shown_names import printable

#: Enough of a status without its groups, which may be many, and what follows them.
_STATUS_BYTES: Final = 2048
#: Of a status: real, effective, saved, and that of the file system (setfsuid(2)).
_FILE_IDS: Final = re.compile(rb"\nUid:\t\d+\t\d+\t\d+\t(\d+)\nGid:\t\d+\t\d+\t\d+\t(\d+)\n")
_STAT_BYTES: Final = 2048
#: Fields of /proc/PID/stat (proc_pid_stat(5)), counted behind the command's closing bracket.
_STATE_FIELD: Final = 3 - 3
_FLAGS_FIELD: Final = 9 - 3
_EXIT_CODE_FIELD: Final = 52 - 3
_SIGNAL_MASK: Final = 0x7F
#: linux/sched.h: the process is exiting.
_PF_EXITING: Final = 0x4
#: linux/pidfd.h: PIDFD_GET_INFO, struct pidfd_info of the first size, its exit code (Linux 6.15).
_GET_INFO: Final = 0xC040FF0B
_INFO: Final = struct.Struct("<Q52xi")
_INFO_EXIT: Final = 1 << 3


class Fate(Enum):
    """How a process ended, or that it is alive."""

    LIVES = "lives"
    EXITED = "exits by itself"
    KILLED = "dies of a signal"
    #: It is in another pid namespace, no descriptor is left for the check, or the check failed.
    UNKNOWN = "cannot be told"


def _fate_of_code(code: int) -> Fate:
    return Fate.KILLED if code & _SIGNAL_MASK else Fate.EXITED


def read_at_once(path: str, size_bytes: int, open_file: Callable[[str], int]) -> bytes:
    """Return the content of *path* in /proc, opened by *open_file*; empty if unreadable."""
    try:
        fd = open_file(path)
    except OSError:
        return b""
    try:
        return os.read(fd, size_bytes)
    except OSError:
        return b""  # it ended between open and read (ESRCH)
    finally:
        os.close(fd)


def open_to_read(path: str) -> int:
    """Open *path*. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def process_ids() -> list[int]:
    """Return the ids of all processes that /proc shows, in their order. Raises OSError."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def status_of(
    tid: int, open_file: Callable[[str], int] = open_to_read, most_bytes: int = _STATUS_BYTES
) -> bytes:
    """Return /proc/TID/status, which never waits for the thread; empty if it cannot be read."""
    return read_at_once(f"/proc/{tid}/status", most_bytes, open_file)


class FileIds(NamedTuple):
    """As whom a thread uses files."""

    uid: int
    gid: int


def file_ids_in(status: bytes) -> FileIds | None:
    """Return as whom the thread with this *status* uses files; None if it is empty."""
    found = _FILE_IDS.search(status)
    return None if found is None else FileIds(int(found[1]), int(found[2]))


def stat_fields(pid: int, open_file: Callable[[str], int] = open_to_read) -> list[bytes]:
    """Return /proc/PID/stat behind the name: the state and what follows; empty if it is gone.

    The name is in brackets and may hold anything (proc_pid_stat(5)). Do not call it for a process
    that may be inside execve.
    """
    told = read_at_once(f"/proc/{pid}/stat", _STAT_BYTES, open_file)
    return told.rpartition(b") ")[2].split()


def has_exited(pid: int) -> bool:
    """Whether *pid* has exited but is not gone: not waited for, or a thread of it is stuck."""
    return stat_fields(pid)[:1] in ([b"Z"], [b"X"])


def fate_without_memory(tid: int, open_file: Callable[[str], int]) -> Fate:
    """Return the fate of thread *tid*, which has no memory: a kernel thread, or one that ends.

    ``FDSize: 0`` means that it is past execve's locks and in exit(2). Only then ``stat`` is safe.
    """
    status = status_of(tid, open_file)
    if not status:
        return Fate.UNKNOWN
    if b"\nFDSize:\t0\n" not in status:
        return Fate.LIVES
    fields = stat_fields(tid, open_file)
    if len(fields) <= _EXIT_CODE_FIELD:
        return Fate.UNKNOWN
    return _fate_of_code(int(fields[_EXIT_CODE_FIELD]))


def judge(tgid: int, pidfd: int) -> Fate:
    """Return the fate of process *tgid*, which *pidfd* refers to, at this moment.

    ``stat`` shows the signal as soon as kill(2) returns, before the process handles it. This may
    wait as long as the process is inside execve, so never call it in the thread that serves.
    """
    fields = stat_fields(tgid)
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return fate_of_reaped(pidfd)
    except OSError:
        return Fate.UNKNOWN
    # It was not waited for yet, so its number was not reused.
    if len(fields) <= _EXIT_CODE_FIELD:
        return Fate.UNKNOWN
    if fields[_STATE_FIELD] in (b"T", b"t"):
        return Fate.LIVES  # stopped: the value is the signal that stopped it
    code = int(fields[_EXIT_CODE_FIELD])
    ends = int(fields[_FLAGS_FIELD]) & _PF_EXITING or fields[_STATE_FIELD] in (b"Z", b"X")
    return _fate_of_code(code) if ends or code & _SIGNAL_MASK else Fate.LIVES


def fate_of_reaped(pidfd: int) -> Fate:
    """Return the fate of a process that was already waited for, from its *pidfd*."""
    told = bytearray(_INFO.size)
    _INFO.pack_into(told, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, told)
    except OSError:
        return Fate.UNKNOWN  # before Linux 6.15
    mask, code = _INFO.unpack(told)
    return _fate_of_code(code) if mask & _INFO_EXIT else Fate.UNKNOWN


_WORD_BYTES: Final = 64
_WAITS: Final = b"\nState:\tD"
#: Where a caller waits for a FUSE server (fs/fuse/dev.c). If that is the process itself, no device
#: is at fault.
_FOR_FUSE: Final = "request_wait_answer"


class DeviceWait(NamedTuple):
    """A thread that waits in the kernel for a device that does not answer.

    In the state D it ends for no signal, not even for SIGKILL, until the device answers
    (proc_pid_stat(5)). Its process stays after a kill, with all that it has open and locked; left
    alone, it goes on by itself.
    """

    thread: str
    """The thread's name."""
    function: str
    """The function of the kernel that it waits in; "?" if the kernel does not say."""

    def __str__(self) -> str:
        return f"thread {self.thread} waits in {self.function}"


def device_wait(pid: int) -> DeviceWait | None:
    """Return a thread of *pid* that waits for a device at this moment; None if none does.

    All threads are looked at: the main one may wait for what another has locked. Any read from a
    device is such a wait, mostly a short one, so ask only for a process that has been silent. None
    also for a process that is gone, or whose threads cannot be listed.
    """
    threads = f"/proc/{pid}/task"
    try:
        tids = sorted(int(name) for name in os.listdir(threads)) if pid > 0 else []
    except OSError:
        return None
    for tid in tids:
        if _WAITS not in status_of(tid):
            continue
        function = _told(f"{threads}/{tid}/wchan")
        if function != _FOR_FUSE:
            return DeviceWait(_told(f"{threads}/{tid}/comm"), function)
    return None


def _told(path: str) -> str:
    told = read_at_once(path, _WORD_BYTES, open_to_read).decode(errors="replace")
    # The kernel says 0 if the thread runs again, or if the reader may not know.
    return printable(told.removesuffix("\n")) if told not in ("", "0") else "?"
