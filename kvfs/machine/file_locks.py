"""Which files a process has open, and whether somebody locks them, as /proc/PID/fdinfo tells.

The kernel itself keeps flock(2) and fcntl(2) locks on FUSE, and the server is asked for none of
them. /proc/locks has all at once, but to open it takes 5 to 10 ms: it waits until every CPU has
left what it was doing (locks_start() in fs/locks.c, percpu_down_write()). ``fdinfo`` never waits
for the process (seq_show() in fs/proc/fd.c).
"""

import contextlib
import itertools
import os
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvfs.machine.process_ends import open_to_read, read_at_once

#: A lock is behind the first four lines.
_FDINFO_BYTES: Final = 1024
#: Descriptors looked at, of all processes together: some 3 ms.
DESCRIPTORS_MAX: Final = 256


class Holders(NamedTuple):
    """What was found of one file; what lies behind the bound was not."""

    #: The processes that have it open.
    tgids: frozenset[int]
    #: Whether a lock is held through a descriptor of theirs: flock, POSIX or OFD.
    locked: bool


def holders(ino: int, tgids: Iterable[int]) -> Holders:
    """Return who of *tgids* has file *ino* open, and whether it is locked.

    The number alone tells the file: one of another file system with that number, in one of these
    processes, is taken for it.
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
