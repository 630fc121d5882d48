"""The two permission checks that kvfs makes; the kernel makes all others (default_permissions).

A CREATE that finds the name taken is not checked by the kernel (may_open(), fs/namei.c). And it
checks behind a LOOKUP, which is too late where that LOOKUP empties the file (truncating_open.py).
"""

import os
import stat

from kvfs.core.types import InodeRecord
from kvfs.machine.credentials import Credentials

_READ, _WRITE = 4, 2


def surely_may_open(record: InodeRecord, flags: int, uid: int, gid: int, *, sticky: bool) -> bool:
    """Whether *uid* with group *gid* may open *record* with open(2) *flags*; False: ask the kernel.

    It alone knows other groups, capabilities, and its rule for *sticky* directories
    (fs.protected_regular).
    """
    if not stat.S_ISREG(record.mode):
        return False
    access = flags & os.O_ACCMODE
    needs = 0 if access == os.O_WRONLY else _READ
    if access != os.O_RDONLY or flags & os.O_TRUNC:
        needs |= _WRITE
    if uid == record.uid:
        granted = record.mode >> 6
    elif sticky:
        return False
    elif gid == record.gid:
        granted = record.mode >> 3
    else:  # of the group or not, whichever
        granted = record.mode >> 3 & record.mode
    return granted & needs == needs


def may_empty(record: InodeRecord, who: Credentials, *, reads: bool, sticky: bool) -> bool:
    """Whether *who* may open file *record* with O_TRUNC, and for reading too if it *reads*.

    As acl_permission_check() and generic_permission() have it, fs/namei.c. In a *sticky* directory
    only its owner: an O_CREAT would be refused for others, also to root (fs.protected_regular).
    """
    if sticky and who.uid != record.uid:
        return False
    if who.overrides:
        return True
    if who.uid == record.uid:
        granted = record.mode >> 6
    elif record.gid == who.gid or record.gid in who.groups:
        granted = record.mode >> 3
    else:
        granted = record.mode
    needs = _WRITE | (_READ if reads else 0)
    return granted & needs == needs
