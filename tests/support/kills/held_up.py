"""A process that has exited, and of which a thread lives on with the server's /dev/fuse.

So the kernel leaves a killed server whose thread waits for a dying drive: the thread keeps all open
files, nobody answers, and calls on the mount wait.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvfs.machine.process_ends import has_exited
from tests.support.clients.stepping import until

_PIDFD_GETFD: Final = 438
#: exit(2) ends the calling thread alone: 60 on x86-64, 93 on aarch64.
_EXITED: Final = """
import ctypes, os, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""


@contextlib.contextmanager
def device_of(server_pid: int) -> Iterator[int]:
    """Yield a descriptor of the server's /dev/fuse (pidfd_getfd(2))."""
    found: list[int] = []
    for entry in Path(f"/proc/{server_pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed since it was listed
            if os.readlink(entry) == "/dev/fuse":
                found.append(int(entry.name))
    (theirs,) = found
    pidfd = os.pidfd_open(server_pid)
    ours = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, theirs, 0)
    os.close(pidfd)
    assert ours >= 0, os.strerror(ctypes.get_errno())
    try:
        yield ours
    finally:
        os.close(ours)


@contextlib.contextmanager
def held_up(server_pid: int) -> Iterator[int]:
    """Yield the pid of such a process; it ends on leaving."""
    with device_of(server_pid) as device:
        process = subprocess.Popen(
            [sys.executable, "-c", _EXITED], stdin=subprocess.PIPE, pass_fds=[device]
        )
    with process:  # its thread ends with its standard input
        until(lambda: has_exited(process.pid), "its main thread has exited")
        yield process.pid
