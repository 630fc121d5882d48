"""Processes that made blocks: told apart when pids are reused, and watched until they end.

A request names a thread. Its process is ``Tgid`` in /proc/TID/status, which never waits for the
thread (process_ends.py). The birth of a process is the inode number of its pidfd, unique within a
boot (pidfs, Linux 6.9; pidfd_open(2)), mixed with the boot id. Without the boot id a service that
is started at boot could get the same pid and the same birth in each boot.
"""

import contextlib
import errno
import os
import select
import threading
import zlib
from collections import OrderedDict
from typing import Final, NamedTuple

from kvfs.core.shown_names import printable
from kvfs.machine.file_servers import (
    BELIEVED_S,
    THREADS_MAX,
    FileServers,
    is_kernel_thread,
    tgid_of,
)
from kvfs.machine.process_ends import (
    Fate,
    fate_without_memory,
    file_ids_in,
    judge,
    open_to_read,
    read_at_once,
    status_of,
)
from kvfs.machine.process_limits import watched_max
from kvfs.storage.run_state import present_boot_id

_PROCESSES_MAX: Final = 4096
_STATM_BYTES: Final = 128
_NAME_BYTES: Final = 64
#: No user's number.
UNKNOWN_UID: Final = -1
#: What the kernel shows of a user that has no number here (user_namespaces(7)).
OVERFLOW_UID: Final = 65534
NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
#: Above the inode numbers of pidfds: 32 bits of the boot's id.
_BOOT_SHIFT: Final = 32


class Maker(NamedTuple):
    """A process. With ``tgid`` 0 it is any process that cannot be watched."""

    tgid: int
    birth: int

    @property
    def is_one(self) -> bool:
        """Whether it is one certain process."""
        return self.tgid > 0


#: A process of another pid namespace, or an unknown one.
NOBODY: Final = Maker(0, 0)
#: A kernel thread or a user-space NFS server, which lives on when its clients die.
SERVER: Final = Maker(0, 1)


class Question:
    """How a process ended, asked in a thread of its own; ``fate`` is None until it is known."""

    def __init__(self, fate: Fate | None = None) -> None:
        self.fate = fate
        self._thread: threading.Thread | None = None

    def ask(self, tgid: int, pidfd: int) -> None:
        """Begin to find out the fate of process *tgid*; its *pidfd* is closed after that."""

        def find_out() -> None:
            try:
                self.fate = judge(tgid, pidfd)
            finally:
                os.close(pidfd)

        self._thread = threading.Thread(target=find_out, name="kvfs-fate", daemon=True)
        self._thread.start()

    def wait(self, wait_s: float) -> None:
        """Wait for the answer, at most *wait_s*."""
        if self._thread is not None:
            self._thread.join(max(wait_s, 0.0))


def program_of(pid: int) -> str:
    """Return the name of *pid*'s program, printable; "?" if it is unknown."""
    name = read_at_once(f"/proc/{pid}/comm", _NAME_BYTES, open_to_read) if pid > 0 else b""
    return printable(name.decode(errors="replace").removesuffix("\n")) or "?"


class Processes:
    """The processes that blocks belong to, and whether they live."""

    def __init__(self, file_servers: str = "") -> None:
        """*file_servers*: the setting of that name."""
        self._spare = SpareFiles()
        self.servers: Final = FileServers(file_servers, self._open)
        self._boot = zlib.crc32(present_boot_id().encode()) << _BOOT_SHIFT
        self._threads: OrderedDict[int, tuple[float, Maker]] = OrderedDict()
        #: A pidfd for each watched process; readable once it has ended.
        self._pidfds: OrderedDict[Maker, int] = OrderedDict()
        self._poll = select.poll()
        #: /proc/TID/statm of threads that closed what they wrote: an open costs three times as much
        #: as a read. It stays with its thread even if the number is reused (ESRCH).
        self._statms: OrderedDict[int, int] = OrderedDict()
        #: How recently ended processes ended.
        self._fates: OrderedDict[Maker, Fate] = OrderedDict()

    def close(self) -> None:
        """Stop watching all processes."""
        for fd in (*self._pidfds.values(), *self._statms.values()):
            os.close(fd)
        self._pidfds.clear()
        self._statms.clear()
        self._spare.close()

    def _open(self, path: str) -> int:
        """Open *path* in /proc, with a descriptor from the reserve if there is no other.

        Raises OSError.
        """
        try:
            return open_to_read(path)
        except OSError as error:
            if not self._gives_way(error):
                raise
        return open_to_read(path)

    def _open_pidfd(self, tgid: int) -> int:
        """Return a pidfd of process *tgid*; raises as ``_open``."""
        try:
            return os.pidfd_open(tgid)
        except OSError as error:
            if not self._gives_way(error):
                raise
        return os.pidfd_open(tgid)

    def _gives_way(self, error: OSError) -> bool:
        """Whether *error* was a lack of descriptors, and one of the reserve is free now."""
        if error.errno not in NO_DESCRIPTOR:
            return False
        if self._statms:
            os.close(self._statms.popitem(last=False)[1])
            return True
        return self._spare.give_one()

    def of(self, tid: int, now_s: float) -> Maker:
        """Return the process of thread *tid*, SERVER or NOBODY if it cannot be watched."""
        known = self._threads.get(tid)
        if known is not None and now_s - known[0] < BELIEVED_S:
            return known[1]
        try:
            maker = self._maker_of(tid, now_s)
        except OSError:
            return NOBODY  # for now: there may be a descriptor the next time
        self._threads[tid] = (now_s, maker)
        self._threads.move_to_end(tid)
        if len(self._threads) > THREADS_MAX:
            self._threads.popitem(last=False)
        return maker

    def _maker_of(self, tid: int, now_s: float) -> Maker:
        """Return the process of thread *tid*. Raises OSError if that cannot be told now."""
        if tid <= 0:
            return NOBODY  # another pid namespace
        status = status_of(tid, self._open)
        if self.servers.learn(tid, status, now_s):
            return SERVER
        tgid = tgid_of(status)
        if not tgid:
            raise ProcessLookupError
        pidfd = self._open_pidfd(tgid)
        maker = Maker(tgid, self._birth(pidfd))
        if maker in self._pidfds or len(self._pidfds) >= min(_PROCESSES_MAX, watched_max()):
            os.close(pidfd)
        else:
            self._pidfds[maker] = pidfd
            self._poll.register(pidfd, select.POLLIN)
        return maker

    def _birth(self, pidfd: int) -> int:
        return os.fstat(pidfd).st_ino ^ self._boot

    def fate_of(self, tid: int) -> Fate:
        """Return the fate of thread *tid*, which closes a file: LIVES, or how it ends.

        A dying process loses its memory before its files (do_exit, kernel/exit.c), so ``statm``
        shows whether it lives on. UNKNOWN if the thread cannot be looked at or does not exist.
        """
        if tid <= 0:
            return Fate.UNKNOWN  # another pid namespace
        try:
            statm = self._statm(tid)
        except OSError:
            return Fate.UNKNOWN
        return fate_without_memory(tid, self._open) if statm.startswith(b"0 ") else Fate.LIVES

    def _statm(self, tid: int) -> bytes:
        """Return /proc/TID/statm. Raises OSError."""
        fd = self._statms.get(tid)
        if fd is not None:
            try:
                return os.pread(fd, _STATM_BYTES, 0)
            except OSError:  # another thread has the number now
                os.close(self._statms.pop(tid))
        fd = self._open(f"/proc/{tid}/statm")
        self._statms[tid] = fd
        if len(self._statms) > min(THREADS_MAX, watched_max()):
            os.close(self._statms.popitem(last=False)[1])
        return os.pread(fd, _STATM_BYTES, 0)

    def is_kernel_thread(self, tid: int) -> bool:
        """Whether *tid* is a kernel thread, such as nfsd or a loop device: no signal ends it."""
        return tid > 0 and is_kernel_thread(status_of(tid, self._open))

    def uid_of(self, tid: int) -> int:
        """Return as which user thread *tid* uses files, of those of this user namespace.

        UNKNOWN_UID if that cannot be told: it is of another pid namespace, or of the kernel, which
        acts for others (nfsd), or its user has no number here. While a thread waits for its answer
        it cannot become another user's, and no other gets its number.
        """
        status = status_of(tid, self._open) if tid > 0 else b""
        ids = file_ids_in(status)
        if ids is None or ids.uid == OVERFLOW_UID or is_kernel_thread(status):
            return UNKNOWN_UID
        return ids.uid

    def ask(self, maker: Maker) -> Question:
        """Ask how *maker* ended; the answer may take a while."""
        if maker in self._fates or not maker.is_one:
            return Question(self._fates.get(maker, Fate.UNKNOWN))
        watched = self._pidfds.get(maker)
        try:
            pidfd = self._open_pidfd(maker.tgid) if watched is None else os.dup(watched)
        except OSError:
            return Question(Fate.UNKNOWN)
        if watched is None and self._birth(pidfd) != maker.birth:
            os.close(pidfd)
            return Question(Fate.UNKNOWN)
        question = Question()
        question.ask(maker.tgid, pidfd)
        return question

    def lives(self, maker: Maker) -> bool:
        """Whether *maker*, perhaps from before a restart of this server, still runs.

        Raises OSError if there is no descriptor to find out, or to watch it.
        """
        if maker in self._pidfds:
            return True  # ``ended`` reports its end
        if len(self._pidfds) >= watched_max():
            raise OSError(errno.EMFILE, "as many processes are watched as may be")
        try:
            pidfd = self._open_pidfd(maker.tgid)
        except (ValueError, OverflowError):
            return False
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            return False
        if self._birth(pidfd) != maker.birth or _ended(pidfd):
            os.close(pidfd)
            return False
        self._pidfds[maker] = pidfd
        self._poll.register(pidfd, select.POLLIN)
        return True

    def ended(self) -> list[Maker]:
        """Return the watched processes that have ended since the last call."""
        self._spare.refill()
        if not self._pidfds:
            return []
        readable = {fd for fd, _ in self._poll.poll(0)}
        if not readable:
            return []
        gone = [maker for maker, pidfd in self._pidfds.items() if pidfd in readable]
        for maker in gone:
            pidfd = self._pidfds.pop(maker)
            self._poll.unregister(pidfd)
            self._remember(maker, pidfd)
            os.close(pidfd)
        return gone

    def _remember(self, maker: Maker, pidfd: int) -> None:
        """Keep how *maker* ended. Before Linux 6.15 that is lost once it was waited for."""
        fate = judge(maker.tgid, pidfd)  # it has ended, so it is not in execve
        self._fates[maker] = fate
        if len(self._fates) > _PROCESSES_MAX:
            self._fates.popitem(last=False)


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


#: A check needs one descriptor at a time and closes it afterwards, so a few are enough, even if
#: some hundred files are closed between two ticks.
_KEPT: Final = 8


class SpareFiles:
    """Descriptors in reserve, for checks that must work when all others are used.

    Empty until its first ``refill``.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []

    def refill(self) -> None:
        """Open as many as were given out, as far as possible."""
        with contextlib.suppress(OSError):
            while len(self._fds) < _KEPT:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def give_one(self) -> bool:
        """Close one; False if none is left."""
        if not self._fds:
            return False
        os.close(self._fds.pop())
        return True

    def close(self) -> None:
        """Close all."""
        while self.give_one():
            pass
