"""The two permission checks that kvfs makes; the kernel makes all others (default_permissions).

A CREATE that finds the name taken is not checked by the kernel (may_open(), fs/namei.c). And it
checks an OPEN after its LOOKUP, which is too late where the LOOKUP empties the file
(truncating_open.py).
"""

import os
import stat
from typing import Final, NamedTuple

from kvfs.core.types import InodeRecord
from kvfs.machine.process_ends import file_ids_in, status_of

_READ, _WRITE = 4, 2
#: capabilities(7), linux/capability.h.
_CAP_DAC_OVERRIDE: Final = 1
#: 65,536 groups of 11 digits (NGROUPS_MAX), and the rest.
_STATUS_MOST_BYTES: Final = 1 << 20


class Credentials(NamedTuple):
    """What a thread may do now; uid and gid are those for file systems (setfsuid(2)).

    A request carries one uid and one gid (struct fuse_in_header). The rest is in /proc/TID/status,
    which can be read without waiting for the thread (process_ends.py).
    """

    uid: int
    gid: int
    groups: frozenset[int]
    #: Whether it passes every check of modes (CAP_DAC_OVERRIDE in this user namespace).
    overrides: bool


def credentials_of(tid: int) -> Credentials | None:
    """Return what thread *tid* may do, None if that cannot be told."""
    status = status_of(tid, most_bytes=_STATUS_MOST_BYTES)
    ids = file_ids_in(status)
    if ids is None:
        return None
    try:
        lines = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
        groups = frozenset(map(int, lines[b"Groups"].split()))
        capable = int(lines[b"CapEff"], 16) >> _CAP_DAC_OVERRIDE & 1
    except (LookupError, ValueError):
        return None
    return Credentials(ids.uid, ids.gid, groups, bool(capable) and _is_neighbour(tid))


def _is_neighbour(tid: int) -> bool:
    """Whether *tid* is in this user namespace: capabilities of another one say nothing here."""
    try:
        own, its = (os.stat(f"/proc/{who}/ns/user") for who in ("self", tid))
    except OSError:
        return False  # it ended, or this process may not look
    return (own.st_dev, own.st_ino) == (its.st_dev, its.st_ino)


def surely_may_open(record: InodeRecord, flags: int, uid: int, gid: int, *, sticky: bool) -> bool:
    """Whether *uid* with group *gid* may open *record* with open(2) *flags*; False: ask the kernel.

    The kernel alone knows other groups, capabilities, and its rule for *sticky* directories
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
    else:  # perhaps in the group: both must allow it
        granted = record.mode >> 3 & record.mode
    return granted & needs == needs


def may_empty(record: InodeRecord, who: Credentials, *, reads: bool, sticky: bool) -> bool:
    """Whether *who* may open file *record* with O_TRUNC, and for reading too if it *reads*.

    The rules of acl_permission_check() and generic_permission(), fs/namei.c. In a *sticky*
    directory only its owner may: an O_CREAT by others, root included, would be refused
    (fs.protected_regular).
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
