"""What the identity of an inode says by its record, and whether the device has just that."""

import stat

from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import IDENTIFIED, SLABS, State
from kvfs.core.records import IS_SLAB, OF_BYTES, Identity
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.storage.extents import Extents


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
        flags=IS_SLAB if record.state in SLABS else 0,
        content_crc=0,
        name=record.name,
    )


def carries_identity(record: InodeRecord) -> bool:
    """Whether *record*'s inode has an identity; drafts and second names have none."""
    if stat.S_ISREG(record.mode):
        return record.state in IDENTIFIED
    return record.state != State.ALIAS


def is_identified(extents: Extents, ino: InodeNo, *, of_node: bool) -> bool:
    """Whether a file has an identity, even an unreadable one. Raises OSError."""
    try:
        return (extents.node(ino) if of_node else extents.identity(ino)) is not None
    except Damaged:
        return True


def agrees(extents: Extents, ino: InodeNo, record: InodeRecord) -> bool:
    """Whether the identity of *ino* on the device agrees with *record*. Raises OSError."""
    try:
        if record.state == State.ALIAS:
            return True
        if not carries_identity(record):  # being written; a kill may have prevented the removal
            return extents.identity(ino) is None
        if stat.S_ISREG(record.mode):
            return _is_of(extents.identity(ino), ino, record)
        node = extents.node(ino)
    except Damaged:
        return False
    return node is not None and node[1] == record.target and _is_of(node[0], ino, record)


def _is_of(identity: Identity | None, ino: InodeNo, record: InodeRecord) -> bool:
    """Whether *identity* is that of *record*; the mtime of a directory is ignored."""
    expected = identity_of(ino, record)
    if identity is None:
        return False
    if not stat.S_ISDIR(record.mode):
        return identity._replace(flags=identity.flags & ~OF_BYTES, content_crc=0) == expected
    return identity._replace(mtime_ns=0) == expected._replace(mtime_ns=0)
