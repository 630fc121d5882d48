"""Which processes have a file open, and whether they lock it, as /proc/PID/fdinfo shows.

The file may be /dev/fuse: while a process has a mount's open, calls on the mount wait.

The kernel itself keeps flock(2) and fcntl(2) locks on FUSE, without asking the server. /proc/locks
has all at once, but opening it takes 5 to 10 ms, because it waits for every CPU (locks_start() in
fs/locks.c, percpu_down_write()). ``fdinfo`` never waits for the process (seq_show() in
fs/proc/fd.c).
"""

import contextlib
import itertools
import os
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvfs.machine.mount_table import FUSE_DEVICE
from kvfs.machine.process_ends import has_exited, open_to_read, process_ids, read_at_once

#: Enough to show a lock, which follows the first four lines.
_FDINFO_BYTES: Final = 1024
#: Descriptors looked at, of all processes together: some 3 ms.
DESCRIPTORS_MAX: Final = 256


class Holders(NamedTuple):
    """What was found about one file among the first DESCRIPTORS_MAX descriptors."""

    #: The processes that have it open.
    tgids: frozenset[int]
    #: Whether a lock is held through a descriptor of theirs: flock, POSIX or OFD.
    locked: bool


def holders(ino: int, tgids: Iterable[int]) -> Holders:
    """Return who of *tgids* has file *ino* open, and whether it is locked.

    Only the inode number is compared: if one of these processes has a file with that number open on
    another file system, that counts, too.
    """
    have, locked = set(), False
    left = DESCRIPTORS_MAX
    is_it = b"\nino:\t%d\n" % ino
    for tgid in tgids:
        directory = f"/proc/{tgid}/fdinfo"
        with contextlib.suppress(OSError), os.scandir(directory) as listed:
            for descriptor in itertools.islice(listed, left):
                left -= 1
                told = read_at_once(descriptor.path, _FDINFO_BYTES, open_to_read)
                if is_it in told:
                    have.add(tgid)
                    locked = locked or b"\nlock:\t" in told
    return Holders(frozenset(have), locked)


def is_locked(ino: int) -> bool:
    """Whether anybody locks file *ino*, or one with that number elsewhere; takes 5 to 10 ms.

    What a process of another pid namespace locks is not shown. If nothing can be read: True.
    """
    try:
        with open("/proc/locks", "rb") as locks:
            return b":%d " % ino in locks.read()
    except OSError:
        return True


#: fuse_dev_show_fdinfo in fs/fuse/dev.c, from Linux 6.16.
_LINE: Final = "fuse_connection:\t"


def held_up_by(connection: int) -> int:
    """Return an exited process of which a thread, stuck in the kernel, has *connection* open.

    *connection* is the minor number of the mount's device. 0 if nobody has it open, if a living
    process has, too, or if the kernel does not show it.
    """
    having = [pid for pid in process_ids() if _holds(pid, connection)]
    exited = [pid for pid in having if has_exited(pid)]
    return exited[0] if exited and exited == having else 0


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
