"""Which processes have a mount's /dev/fuse open: while one has, calls on the mount wait."""

import contextlib
import os
from typing import Final

from kvfs.machine.mount_table import FUSE_DEVICE
from kvfs.machine.process_ends import has_exited, process_ids

#: fuse_dev_show_fdinfo in fs/fuse/dev.c, from Linux 6.16.
_LINE: Final = "fuse_connection:\t"


def held_up_by(connection: int) -> int:
    """Return an exited process of which a thread, stuck in the kernel, has *connection* open.

    *connection* is the minor number of the mount's device. 0 if nobody has it open, if a living
    process has, too, or if the kernel does not show it.
    """
    holders = [pid for pid in process_ids() if _holds(pid, connection)]
    exited = [pid for pid in holders if has_exited(pid)]
    return exited[0] if exited and exited == holders else 0


def _holds(pid: int, connection: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        for tid in os.listdir(f"/proc/{pid}/task"):  # the main thread has no files once it exited
            if _thread_holds(f"/proc/{pid}/task/{tid}", connection):
                return True
    return False


def _thread_holds(thread: str, connection: int) -> bool:
    with contextlib.suppress(OSError):
        return any(
            _line_of(f"{thread}/fdinfo/{fd}") == f"{_LINE}{connection}\n"
            for fd in os.listdir(f"{thread}/fd")
            if _leads_to(f"{thread}/fd/{fd}") == FUSE_DEVICE
        )
    return False


def _leads_to(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def _line_of(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return next((line for line in file if line.startswith(_LINE)), "")
    return ""
