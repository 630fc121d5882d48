"""Ends what a killed run of tests leaves in its mount namespace (own_mounts.py starts it).

Its argument is the process with tests, which is its parent. When that process has ended, however,
every process of the namespace is killed: servers would keep the namespace, which would keep their
mounts.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Final

#: One that hangs in the kernel cannot be killed.
_ROUNDS: Final = 100
_ROUND_S: Final = 0.1


def in_namespace(namespace: str) -> list[int]:
    """Return the processes of the mount namespace with this link, but for this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(process / "ns/mnt") == namespace and process.name != str(os.getpid()):
                found.append(int(process.name))
    return found


def wait_for_end(parent: int) -> None:
    """Return when process *parent* has ended."""
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() == parent:  # else it has ended already, and another one has its number
        select.select([pidfd], [], [])


def main() -> None:
    """Wait for the end of the parent; then kill until nobody is left, for some 10 s."""
    wait_for_end(int(sys.argv[1]))
    for _ in range(_ROUNDS):
        for pid in (left := in_namespace(os.readlink("/proc/self/ns/mnt"))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        threading.Event().wait(_ROUND_S)


if __name__ == "__main__":
    main()
