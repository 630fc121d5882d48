"""Whether a mount that no control socket speaks for still has a server.

A statfs(2) goes to the server each time. The kernel refuses it with ENOTCONN once nobody has
/dev/fuse open any more (fuse_get_req in fs/fuse/dev.c), and waits for a server that hangs, if
need be through SIGKILL. So a program of its own asks (``python -m kvfs.client.liveness
MOUNTPOINT``), and is left behind when it takes too long.
"""

import errno
import os
import subprocess
import sys
from typing import Final

from kvfs.client.subprocesses import LOOK_MAX_S, program_again

_DEAD: Final = 77
#: After the server's end, and after its connection was aborted.
_ENDED: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED})


def has_ended(mountpoint: str) -> bool:
    """Whether the kvfs mounted at *mountpoint* has lost its server for good, within 3 s."""
    command, environment = program_again("kvfs.client.liveness")
    looker = subprocess.Popen(
        [*command, mountpoint],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        return looker.wait(LOOK_MAX_S) == _DEAD
    except subprocess.TimeoutExpired:
        looker.kill()
        looker.returncode = 0  # it may outlive us; Popen would warn
        return False


def was_killed(pid: int) -> bool:
    """Whether server *pid* is dead but for a thread that the kernel holds up.

    It has /dev/fuse open, so that callers wait for answers that never come; and its socket, at
    which nobody answers either.
    """
    from kvfs.machine.process_ends import has_exited

    return has_exited(pid)


def main() -> None:
    """End with _DEAD if it has."""
    try:
        os.statvfs(sys.argv[1])
    except OSError as error:
        sys.exit(_DEAD if error.errno in _ENDED else 1)


if __name__ == "__main__":
    main()
