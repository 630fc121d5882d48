"""Which files a process has open, and whether they are locked, as /proc/PID/fdinfo shows.

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

from kvfs.machine.process_ends import open_to_read, read_at_once

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
