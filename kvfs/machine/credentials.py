"""What a thread may do as it stands: its groups and the one capability that passes all modes.

A request tells one uid and one gid (struct fuse_in_header). The rest is in /proc/TID/status,
which never waits for the thread (processes.py).
"""

import os
from typing import Final, NamedTuple

#: capabilities(7), linux/capability.h.
_CAP_DAC_OVERRIDE: Final = 1
#: 65,536 groups of 11 digits (NGROUPS_MAX), and the rest.
_STATUS_MOST_BYTES: Final = 1 << 20


class Credentials(NamedTuple):
    """Those that decide about files; both numbers are of the file system (setfsuid(2))."""

    uid: int
    gid: int
    groups: frozenset[int]
    #: Whether it passes every check of modes (CAP_DAC_OVERRIDE in this user namespace).
    overrides: bool


def credentials_of(tid: int) -> Credentials | None:
    """Return what thread *tid* may do, None if that cannot be told."""
    try:
        lines = dict(line.split(b":", 1) for line in _status(tid).splitlines() if b":" in line)
        uid, gid = (int(lines[field].split()[3]) for field in (b"Uid", b"Gid"))
        groups = frozenset(map(int, lines[b"Groups"].split()))
        capable = int(lines[b"CapEff"], 16) >> _CAP_DAC_OVERRIDE & 1
    except (OSError, LookupError, ValueError):
        return None
    return Credentials(uid, gid, groups, bool(capable) and _is_neighbour(tid))


def _status(tid: int) -> bytes:
    with open(f"/proc/{tid}/status", "rb", buffering=0) as file:
        read = b""
        while len(read) < _STATUS_MOST_BYTES and (more := file.read(_STATUS_MOST_BYTES)):
            read += more
    return read


def _is_neighbour(tid: int) -> bool:
    """Whether *tid* is in this user namespace: capabilities of another one say nothing here."""
    try:
        own, its = (os.stat(f"/proc/{who}/ns/user") for who in ("self", tid))
    except OSError:
        return False  # it ended, or this process may not look
    return (own.st_dev, own.st_ino) == (its.st_dev, its.st_ino)
