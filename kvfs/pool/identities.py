"""Identities of extents, directories and symlinks: written and removed off the hot path.

After a power loss the index is rebuilt from them (recovery.py). So only whole blocks get one, and
it is erased before the inode number is forgotten.
"""

import contextlib
import functools
import stat

from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import IDENTIFIED
from kvfs.core.records import Identity
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.unlink_queue import UnlinkQueue
from kvfs.storage.background import Background
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
        flags=0,
        name=record.name,
    )


def carries_identity(record: InodeRecord) -> bool:
    """Whether *record*'s inode has an identity; fifos, sockets and drafts have none."""
    if stat.S_ISREG(record.mode):
        return record.state in IDENTIFIED
    return stat.S_ISDIR(record.mode) or stat.S_ISLNK(record.mode)


def agrees(extents: Extents, ino: InodeNo, record: InodeRecord) -> bool:
    """Whether the identity of *ino* on the device agrees with *record*. Raises OSError."""
    try:
        if not carries_identity(record):  # it became a slab, and a kill came before the removal
            return not stat.S_ISREG(record.mode) or extents.identity(ino) is None
        if stat.S_ISREG(record.mode):
            return _is_of(extents.identity(ino), ino, record)
        node = extents.node(ino)
    except Damaged:
        return False
    return node is not None and node[1] == record.target and _is_of(node[0], ino, record)


def _is_of(identity: Identity | None, ino: InodeNo, record: InodeRecord) -> bool:
    """Whether *identity* is that of *record*. A directory's ignores its mtime."""
    expected = identity_of(ino, record)
    if identity is None or not stat.S_ISDIR(record.mode):
        return identity == expected
    return identity._replace(mtime_ns=0) == expected._replace(mtime_ns=0)


class Identities:
    """Queues identities of inodes for the background."""

    def __init__(self, extents: Extents, background: Background, unlink_queue: UnlinkQueue) -> None:
        self._extents = extents
        self._background = background
        self._unlink_queue = unlink_queue
        #: Overwritten in place, and final now. The identity is written when the bytes are durable,
        #: because a rebuild could not tell old bytes from new ones.
        self._syncing: dict[InodeNo, Identity] = {}
        #: Overwritten blocks that have no identity yet: the next one waits for the bytes, too.
        self._overwritten: set[InodeNo] = set()
        #: Removed, but the device may have them until an fsync, a new identity, or the unlink.
        self._lingering: set[InodeNo] = set()
        #: Identities whose removal is queued, or has failed.
        self._withdrawing: set[InodeNo] = set()
        #: The bytes of inodes below this number may not be durable: a killed server may have
        #: overwritten them in place, and that is not recorded (sweep.py).
        self.unsure_below = InodeNo(0)

    def write(self, ino: InodeNo, record: InodeRecord, *, overwritten: bool = False) -> None:
        """Queue *record*'s identity. Drafts, fifos and sockets have none.

        That of a block that was *overwritten* in place, or may have been, waits until its bytes
        are durable.
        """
        if not carries_identity(record):
            return
        identity, target = identity_of(ino, record), record.target
        if not stat.S_ISREG(record.mode):
            self._background.identify(
                ino, lambda: self._extents.identify_node(ino, identity, target)
            )
        elif (
            overwritten
            or ino in self._syncing
            or ino in self._overwritten
            or ino < self.unsure_below
        ):
            self._overwritten.discard(ino)
            self._background.forget(ino)
            self._syncing[ino] = identity
            self._background.submit_long(lambda: self._sync(ino, identity))
        else:
            self._background.identify(ino, lambda: self._write_extent(ino, identity))

    def note_overwritten(self, ino: InodeNo) -> None:
        """Note that *ino*, which has no identity, was overwritten in place."""
        self._overwritten.add(ino)

    def _sync(self, ino: InodeNo, identity: Identity) -> None:
        """Sync in the thread; the extent may be gone before that."""
        if self._syncing.get(ino) is not identity:
            return
        with contextlib.suppress(Damaged):
            self._extents.sync(ino)
        self._background.hand_over(lambda: self._synced(ino, identity))

    def _synced(self, ino: InodeNo, identity: Identity) -> None:
        if self._syncing.get(ino) is identity:
            del self._syncing[ino]
            self._background.identify(ino, lambda: self._write_extent(ino, identity))

    def waiting_for_sync(self, ino: InodeNo | None = None) -> dict[InodeNo, Identity]:
        """Return the identities, or only *ino*'s, that wait for a sync; for ``all_synced``."""
        if ino is None:
            return dict(self._syncing)
        return {ino: self._syncing[ino]} if ino in self._syncing else {}

    def all_synced(self, waiting: dict[InodeNo, Identity]) -> None:
        """Note that a sync made all bytes durable that were written when it began (*waiting*)."""
        for ino, identity in waiting.items():
            self._synced(ino, identity)

    def is_said(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Whether the device may have an identity of *ino*, the present or a former one."""
        return carries_identity(record) or self.was_identified(ino) or ino < self.unsure_below

    def say_now(self, ino: InodeNo) -> None:
        """Do what is queued for *ino* now, but not what waits for a sync."""
        self._background.carry_out(ino)

    def withdraw(self, ino: InodeNo) -> None:
        """Queue the removal of an extent's identity, because its bytes are about to change."""
        self._syncing.pop(ino, None)
        self._withdrawing.add(ino)
        self._background.identify(ino, lambda: self._unidentify(ino))

    def was_identified(self, ino: InodeNo) -> bool:
        """Whether *ino*'s identity was or will be removed and the device may still have it."""
        return ino in self._lingering or ino in self._withdrawing

    def withdraw_now(self, ino: InodeNo) -> bool:
        """Remove an extent's identity; False if the device has none. Raises OSError.

        If True, fsync the extent to remove it durably, and then call ``forgotten``.
        """
        self._syncing.pop(ino, None)
        self._background.forget(ino)
        self._unidentify(ino)
        return ino in self._lingering

    def forgotten(self, ino: InodeNo) -> None:
        """Note that *ino*'s extent was fsynced after the removal of its identity."""
        self._lingering.discard(ino)

    def erase(self, ino: InodeNo, record: InodeRecord) -> None:
        """Queue the removal of all files of *record*'s inode on the device."""
        self._syncing.pop(ino, None)
        self._background.forget(ino)
        self._lingering.discard(ino)
        self._overwritten.discard(ino)
        self._withdrawing.discard(ino)
        if stat.S_ISREG(record.mode):
            remove = functools.partial(self._extents.unlink, ino)
            in_use = functools.partial(self._extents.is_used, ino)
            self._unlink_queue.add(remove, record.allocated_bytes, in_use)
        elif stat.S_ISDIR(record.mode) or stat.S_ISLNK(record.mode):
            self._background.submit(lambda: self._extents.forget_node(ino))

    def _unidentify(self, ino: InodeNo) -> None:
        if self._extents.unidentify(ino):
            self._lingering.add(ino)
        self._withdrawing.discard(ino)

    def _write_extent(self, ino: InodeNo, identity: Identity) -> None:
        self._extents.identify(ino, identity)
        self._lingering.discard(ino)  # the next removal finds this one
        self._withdrawing.discard(ino)
