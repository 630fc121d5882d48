"""Whether a mount without a control socket still has a server.

Every statfs(2) goes to the server. The kernel refuses it with ENOTCONN once nobody has /dev/fuse
open any more (fuse_get_req in fs/fuse/dev.c). If the server hangs, the call waits and not even
SIGKILL ends it. So a separate program asks (``python -m kvfs.client.liveness MOUNTPOINT``), and is
left behind if it takes too long.
"""

import errno
import os
import sys
from typing import Final

from kvfs.client.subprocesses import ended_in_time

_DEAD: Final = 77
#: Errors after the server's end, and after its connection was aborted.
_ENDED: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED})


def has_ended(mountpoint: str) -> bool:
    """Whether the kvfs mounted at *mountpoint* has lost its server for good. Takes 3 s at most.

    True also if calls still wait, but only for a killed server (``held_up_server``).
    """
    return held_up_server(mountpoint) > 0 or has_no_server(mountpoint)


def has_no_server(mountpoint: str) -> bool:
    """Whether nobody has /dev/fuse of the kvfs at *mountpoint* open; False if unknown after 3 s."""
    return ended_in_time("kvfs.client.liveness", mountpoint) == _DEAD


def held_up_server(mountpoint: str) -> int:
    """Return the pid of a killed server that alone keeps the mount at *mountpoint* alive; else 0.

    For one without a control socket: a successor took that over, was killed as well, and has ended.
    """
    from kvfs.machine.file_holders import held_up_by
    from kvfs.machine.mount_table import kvfs_at

    present = kvfs_at(mountpoint)
    return 0 if present is None else held_up_by(int(present.device.split(":")[1]))


def was_killed(pid: int) -> bool:
    """Whether server *pid* was killed, but the kernel still holds up a thread of it.

    That thread keeps /dev/fuse open, so that callers wait for answers that never come. It also
    keeps the control socket open, on which nobody answers.
    """
    from kvfs.machine.process_ends import has_exited

    return has_exited(pid)


def main() -> None:
    """Exit with the code _DEAD if the server has ended."""
    try:
        os.statvfs(sys.argv[1])
    except OSError as error:
        sys.exit(_DEAD if error.errno in _ENDED else 1)


if __name__ == "__main__":
    main()
