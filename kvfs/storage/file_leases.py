"""Whether anybody else has a file open or mapped: the kernel then refuses a lease on it.

fcntl(2), F_SETLEASE; fs/locks.c, check_conflicting_open. A client's passthrough handle counts until
its last close and unmapping. The lease is given back at once: an open in between waits for those
3 us, and its SIGIO is ignored.
"""

import contextlib
import errno
import fcntl
import signal

from kvfs.storage.syscalls import Syscalls


def ignore_breaks() -> None:
    """Have SIGIO ignored, which the kernel sends when a lease is broken.

    Only the main thread may set its handler; elsewhere nothing is done.
    """
    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGIO) is signal.SIG_DFL:
            signal.signal(signal.SIGIO, signal.SIG_IGN)


def refuses_lease(syscalls: Syscalls, fd: int, lease: int) -> bool:
    """Whether the kernel refuses a *lease* (F_RDLCK, F_WRLCK) on *fd*. Raises OSError."""
    if signal.getsignal(signal.SIGIO) is signal.SIG_DFL:
        raise OSError(errno.EPERM, "SIGIO would end the process")
    try:
        syscalls.fcntl(fd, fcntl.F_SETLEASE, lease)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        raise
    syscalls.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def may_be_written(syscalls: Syscalls, fd: int) -> bool:
    """Whether somebody has the file behind *fd*, which is O_RDONLY, open or mapped to write.

    The kernel then refuses a read lease. True if leases do not work here.
    """
    try:
        return refuses_lease(syscalls, fd, fcntl.F_RDLCK)
    except OSError:
        return True
