"""The socket files of control sockets: which are stale, and how one goes without a race."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.core.errors import SourceBusy


@contextmanager
def locked_directory(directory: str) -> Iterator[None]:
    """Hold the directory's lock, so that two starting servers do not remove each other's socket.

    Makes the directory where it is missing; raises OSError when it cannot be made or locked.
    """
    os.makedirs(directory, mode=0o755, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Held for a few system calls, or for one more look at a dead mount.
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove_stale(path: str) -> None:
    """Remove the socket file of a dead server; the caller holds the directory's lock.

    Raises SourceBusy when a server listens there, OSError when *path* is something else.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as attempt:
        attempt.setblocking(False)
        result = attempt.connect_ex(path)
    if result == errno.ENOENT:
        return
    if result == errno.ECONNREFUSED:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):  # any file refuses connections
            raise OSError(errno.ENOTSOCK, "is not a socket")
        os.unlink(path)
        return
    if result in (0, errno.EAGAIN):  # EAGAIN: its backlog is full, so it listens
        raise SourceBusy(f"another kvfs serves under this name already (control socket {path})")
    raise OSError(result, os.strerror(result))
