"""Identities, off the hot path: what each published extent, directory and symlink says of itself.

After a power loss the index is rebuilt from them (recovery.py); so they are written for what is
whole only, and erased before the number is forgotten.
"""

import functools
import stat

from kvfs.background import Background
from kvfs.departures import Departures
from kvfs.extents import Extents
from kvfs.lifecycle import IDENTIFIED
from kvfs.records import Identity
from kvfs.types import InodeNo, InodeRecord


def identity_of(ino: InodeNo, record: InodeRecord) -> Identity:
    """Return the identity that belongs to *record*."""
    return Identity(
        ino=ino,
        parent=record.parent,
        sequence=record.sequence,
        mode=record.mode,
        uid=record.uid,
        gid=record.gid,
        size_bytes=record.size_bytes,
        mtime_ns=record.mtime_ns,
        flags=0,
        name=record.name,
    )


def carries_identity(record: InodeRecord) -> bool:
    """Whether *record*'s inode says on the device what it is: fifos, sockets and drafts do not."""
    if stat.S_ISREG(record.mode):
        return record.state in IDENTIFIED
    return stat.S_ISDIR(record.mode) or stat.S_ISLNK(record.mode)


def says(identity: Identity | None, ino: InodeNo, record: InodeRecord) -> bool:
    """Whether *identity* is that of *record*; a directory's does not follow its mtime."""
    expected = identity_of(ino, record)
    if identity is None or not stat.S_ISDIR(record.mode):
        return identity == expected
    return identity._replace(mtime_ns=0) == expected._replace(mtime_ns=0)


class Identities:
    """Queues identities of inodes to the background thread."""

    def __init__(self, extents: Extents, background: Background, departures: Departures) -> None:
        self._extents = extents
        self._background = background
        self._departures = departures

    def write(self, ino: InodeNo, record: InodeRecord) -> None:
        """Queue *record*'s identity; drafts have none, nor have fifos and sockets."""
        if not carries_identity(record):
            return
        identity, target = identity_of(ino, record), record.target
        if stat.S_ISREG(record.mode):
            self._background.identify(ino, lambda: self._write_extent(ino, identity))
        else:
            self._background.identify(
                ino, lambda: self._extents.identify_node(ino, identity, target)
            )

    def withdraw(self, ino: InodeNo) -> None:
        """Queue the removal of an extent's identity: its bytes are about to change."""
        self._background.identify(ino, lambda: self._extents.unidentify(ino))

    def erase(self, ino: InodeNo, record: InodeRecord) -> None:
        """Queue the removal of what *record*'s inode has on the device."""
        self._background.forget(ino)
        if stat.S_ISREG(record.mode):
            remove = functools.partial(self._extents.unlink, ino)
            self._departures.add(remove, record.allocated_bytes)
        elif stat.S_ISDIR(record.mode) or stat.S_ISLNK(record.mode):
            self._background.submit(lambda: self._extents.forget_node(ino))

    def _write_extent(self, ino: InodeNo, identity: Identity) -> None:
        self._extents.identify(ino, identity)
