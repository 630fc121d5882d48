"""File servers: programs, such as NFS servers, that open files for clients on other machines.

A file server lives on when its clients die, and may keep files open for ever. Each kernel thread
counts as one (nfsd). Programs are known by the name of their first thread, as other threads rename
themselves. The path of the executable would tell, too, but reading it may wait for a process inside
execve(2), which may wait for us. A thread that cannot be read is no server, until the next look.
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvfs.machine.process_ends import status_of

#: How long a result is valid: less than the time in which a thread's number is used again.
BELIEVED_S: Final = 1.0
THREADS_MAX: Final = 1024
#: An NFS server in user space. It keeps a mount in use as long as it exports it.
GANESHA: Final = "ganesha.nfsd"
_PROGRAMS: Final = (GANESHA,)
#: linux/sched.h: TASK_COMM_LEN, less the terminating zero.
_COMM_BYTES: Final = 15


def is_kernel_thread(status: bytes) -> bool:
    """Whether *status*, of /proc/TID/status, is that of a kernel thread.

    Before Linux 6.8 it has no such line. There a kernel thread is a child of kthreadd (2) without
    memory. A dying process has no memory either, but another parent.
    """
    if b"\nKthread:\t" in status:
        return b"\nKthread:\t1\n" in status
    return b"\nPPid:\t2\n" in status and b"\nVmSize:" not in status


def tgid_of(status: bytes) -> int:
    """Return the process of the thread with this *status*; 0 if it does not say."""
    start = status.find(b"\nTgid:\t")
    return 0 if start < 0 else int(status[start + 7 : status.find(b"\n", start + 1)])


class FileServers:
    """Which threads belong to file servers."""

    def __init__(self, named: str, open_file: Callable[[str], int]) -> None:
        """*named*: more programs, separated by commas. *open_file* opens a path for reading."""
        names = {name.strip() for name in named.split(",")} - {""}
        names.update(_PROGRAMS)
        self._comms: Final = frozenset(os.fsencode(name)[:_COMM_BYTES] for name in names)
        self._open: Final = open_file
        #: When each thread was looked at, and whether it belongs to a server.
        self._threads: OrderedDict[int, tuple[float, bool]] = OrderedDict()
        #: Threads that belong to no server; 0 stands for all of another pid namespace.
        self.others: Final = {0}
        #: Threads that belong to one.
        self.servers: Final[set[int]] = set()
        #: The processes of threads that are not their first.
        self.leaders: Final[dict[int, int]] = {}
        self._others_since_s = 0.0

    def have(self, tid: int, now_s: float) -> bool:
        """Whether thread *tid* belongs to a server; False also if that cannot be told now."""
        if tid <= 0:
            return False
        known = self._threads.get(tid)
        if known is not None and now_s - known[0] < BELIEVED_S:
            return known[1]
        return self.learn(tid, status_of(tid, self._open), now_s)

    def learn(self, tid: int, status: bytes, now_s: float) -> bool:
        """Return what ``have`` returns, from the *status* of thread *tid* that was just read."""
        if not status:
            return False
        found = is_kernel_thread(status) or self._is_program(tid, status)
        if (tgid := tgid_of(status)) != tid:
            self.leaders[tid] = tgid
        self._threads[tid] = (now_s, found)
        self._threads.move_to_end(tid)
        if len(self._threads) > THREADS_MAX:
            self._threads.popitem(last=False)
        (self.servers if found else self.others).add(tid)
        return found

    def forget_expired(self, now_s: float) -> None:
        """Forget all results once they have expired: a number may be another thread's by now."""
        if now_s - self._others_since_s >= BELIEVED_S:
            self._others_since_s = now_s
            # All at once: a thread that stays in ``_threads`` would not be put into a set again.
            self._threads.clear()
            self.servers.clear()
            self.leaders.clear()
            self.others.clear()
            self.others.add(0)

    def _is_program(self, tid: int, status: bytes) -> bool:
        tgid = tgid_of(status)
        if not tgid:
            return False
        leader = status if tgid == tid else status_of(tgid, self._open)
        return leader[len(b"Name:\t") : leader.find(b"\n")] in self._comms
