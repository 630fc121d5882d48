"""Who made a block: processes, told apart beyond the reuse of their numbers, and their deaths.

A request names a thread. Its process is ``Tgid`` in /proc/TID/status, which like ``statm``
never waits for the thread: one that sits inside execve(2) while its files are being closed holds
a lock that ``stat``, ``fd``, ``environ``, ``maps``, ``syscall`` and ``stack`` wait for, and it
waits for us. The birth of a process is the inode number of its pidfd, unique for one boot (pidfs,
Linux 6.9; pidfd_open(2)), mixed with the id of the boot: both numbers begin anew with each, and
rise together, so that a service that is started at boot gets the same two again.
"""

import os
import select
import zlib
from collections import OrderedDict
from typing import Final, NamedTuple

from kvfs.printable import printable
from kvfs.run_state import present_boot_id

#: A thread number is believed for so long without a look: shorter than any cycle of numbers.
_THREAD_BELIEVED_S: Final = 1.0
_THREADS_MAX: Final = 1024
_PROCESSES_MAX: Final = 4096
_STATUS_BYTES: Final = 2048
_STAT_BYTES: Final = 2048
_STATM_BYTES: Final = 128
#: exit_code in /proc/PID/stat (proc_pid_stat(5)), counted behind the command's closing bracket.
_EXIT_CODE_FIELD: Final = 52 - 3
_SIGNAL_MASK: Final = 0x7F
#: Above the inode numbers of pidfds: 32 bits of the boot's id.
_BOOT_SHIFT: Final = 32
#: User-space NFS servers: a lease by their life would never end.
_SERVERS: Final = (b"ganesha.nfsd",)


class Maker(NamedTuple):
    """A process. ``tgid`` 0 is one that cannot be watched: a kernel thread, a foreign pid."""

    tgid: int
    birth: int


NOBODY: Final = Maker(0, 0)


def _signal_in_exit(tid: int) -> int:
    """Return the signal of thread *tid*, which has no memory any more; 0 if it exits by itself.

    ``FDSize: 0`` says that it is past execve's locks and in exit(2); only then ``stat`` is safe.
    """
    status = _read(f"/proc/{tid}/status", _STATUS_BYTES)
    if b"\nFDSize:\t0\n" not in status:
        return 0
    fields = stat_fields(tid)
    if len(fields) <= _EXIT_CODE_FIELD:
        return 0
    return int(fields[_EXIT_CODE_FIELD]) & _SIGNAL_MASK


def stat_fields(pid: int) -> list[bytes]:
    """Return /proc/PID/stat behind the name: the state and what follows; empty if it is gone.

    The name stands in brackets and may hold anything (proc_pid_stat(5)). Not to be asked of a
    process that may be inside execve.
    """
    return _read(f"/proc/{pid}/stat", _STAT_BYTES).rpartition(b") ")[2].split()


def has_exited(pid: int) -> bool:
    """Whether *pid* is dead, and not waited for yet or held up by the kernel in a thread."""
    return stat_fields(pid)[:1] in ([b"Z"], [b"X"])


def program_of(pid: int) -> str:
    """Return the name of *pid*'s program, printable; "?" if it is gone or cannot be told."""
    name = _read(f"/proc/{pid}/comm", _STATUS_BYTES) if pid > 0 else b""
    return printable(name.decode(errors="replace").removesuffix("\n")) or "?"


def _read(path: str, size_bytes: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, size_bytes)
    except OSError:
        return b""  # it ended between open and read (ESRCH)
    finally:
        os.close(fd)


class Makers:
    """The processes that blocks belong to, and whether they live."""

    def __init__(self) -> None:
        self._boot = zlib.crc32(present_boot_id().encode()) << _BOOT_SHIFT
        self._threads: OrderedDict[int, tuple[float, Maker]] = OrderedDict()
        #: A pidfd for each watched process; readable once it has ended.
        self._pidfds: OrderedDict[Maker, int] = OrderedDict()
        self._poll = select.poll()
        #: /proc/TID/statm of threads that closed what they wrote: to open one costs three times
        #: what a read does. It stays with its thread, whoever gets the number next (ESRCH).
        self._statms: OrderedDict[int, int] = OrderedDict()

    def close(self) -> None:
        """Let all processes go."""
        for fd in (*self._pidfds.values(), *self._statms.values()):
            os.close(fd)
        self._pidfds.clear()
        self._statms.clear()

    def of(self, tid: int, now_s: float) -> Maker:
        """Return the process of thread *tid*, NOBODY if it cannot be watched."""
        known = self._threads.get(tid)
        if known is not None and now_s - known[0] < _THREAD_BELIEVED_S:
            return known[1]
        maker = self._look(tid)
        self._threads[tid] = (now_s, maker)
        self._threads.move_to_end(tid)
        if len(self._threads) > _THREADS_MAX:
            self._threads.popitem(last=False)
        return maker

    def _look(self, tid: int) -> Maker:
        if tid <= 0:
            return NOBODY  # another pid namespace
        status = _read(f"/proc/{tid}/status", _STATUS_BYTES)
        name = status[len(b"Name:\t") : status.find(b"\n")]
        if b"\nKthread:\t1\n" in status or name in _SERVERS:
            return NOBODY
        start = status.find(b"\nTgid:\t")
        if start < 0:
            return NOBODY
        tgid = int(status[start + 7 : status.find(b"\n", start + 1)])
        try:
            pidfd = os.pidfd_open(tgid)
        except OSError:
            return NOBODY
        maker = Maker(tgid, self._birth(pidfd))
        if maker in self._pidfds or len(self._pidfds) >= _PROCESSES_MAX:
            os.close(pidfd)
        else:
            self._pidfds[maker] = pidfd
            self._poll.register(pidfd, select.POLLIN)
        return maker

    def _birth(self, pidfd: int) -> int:
        return os.fstat(pidfd).st_ino ^ self._boot

    def exit_signal(self, tid: int) -> int:
        """Return the signal that thread *tid* is dying of, 0 if it lives or exits by itself.

        Its memory went before its files did (do_exit, kernel/exit.c): ``statm`` tells of those
        that live on.
        """
        return _signal_in_exit(tid) if self._has_no_memory(tid) else 0

    def _has_no_memory(self, tid: int) -> bool:
        for _ in range(2):  # once more if the number has become another thread's
            fd = self._statms.get(tid)
            if fd is None:
                try:
                    fd = os.open(f"/proc/{tid}/statm", os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    return False
                self._statms[tid] = fd
                if len(self._statms) > _THREADS_MAX:
                    os.close(self._statms.popitem(last=False)[1])
            try:
                return os.pread(fd, _STATM_BYTES, 0).startswith(b"0 ")
            except OSError:
                os.close(self._statms.pop(tid))
        return False

    def lives(self, maker: Maker) -> bool:
        """Whether *maker*, perhaps one from before a restart of this process, still runs."""
        if maker in self._pidfds:
            return True  # ``ended`` tells of its death
        try:
            pidfd = os.pidfd_open(maker.tgid)
        except (OSError, ValueError, OverflowError):
            return False
        if self._birth(pidfd) != maker.birth or _ended(pidfd):
            os.close(pidfd)
            return False
        self._pidfds[maker] = pidfd
        self._poll.register(pidfd, select.POLLIN)
        return True

    def ended(self) -> list[Maker]:
        """Return the watched processes that have ended since the last call."""
        if not self._pidfds:
            return []
        readable = {fd for fd, _ in self._poll.poll(0)}
        if not readable:
            return []
        gone = [maker for maker, pidfd in self._pidfds.items() if pidfd in readable]
        for maker in gone:
            pidfd = self._pidfds.pop(maker)
            self._poll.unregister(pidfd)
            os.close(pidfd)
        return gone


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
