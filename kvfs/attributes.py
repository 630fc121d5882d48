"""Attributes: mode, owner, times and size of an inode, and its small user.* xattrs."""

import stat
from typing import Final, NamedTuple

from kvfs.blocks import Blocks
from kvfs.errors import (
    AttributeTooLarge,
    DeadInode,
    InvalidRequest,
    IsADirectory,
    NoSuchAttribute,
    ReadOnly,
    Unsupported,
)
from kvfs.inode_rules import storable_mode
from kvfs.namespace import Namespace
from kvfs.pool import Pool
from kvfs.types import InodeNo, InodeRecord

_USER_PREFIX: Final = b"user."
#: linux/limits.h XATTR_NAME_MAX; the kernel holds it too.
_XATTR_NAME_MAX_BYTES: Final = 255


class Change(NamedTuple):
    """What a SETATTR wants; None leaves a field as it is. Times in ns since the epoch."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Attributes:
    """Changes attributes of the inodes of one pool."""

    def __init__(self, pool: Pool, namespace: Namespace, blocks: Blocks) -> None:
        self._pool = pool
        self._namespace = namespace
        self._blocks = blocks
        self._identities = pool.identities

    def change(self, ino: InodeNo, change: Change) -> InodeRecord:
        """Apply *change* to *ino* and return its record as of now.

        Raises DeadInode, IsADirectory (size of a directory), TooLarge, ReadOnly.
        """
        pool = self._pool
        if pool.settings.read_only:
            raise ReadOnly
        record = self._namespace.record(ino)
        if change.size_bytes is not None:
            if not stat.S_ISREG(record.mode):
                raise IsADirectory if stat.S_ISDIR(record.mode) else InvalidRequest
            self._blocks.truncate(ino, change.size_bytes)
            record = self._namespace.record(ino)
        changed = self._changed(record, change)
        opened = pool.open_inodes.get(ino)
        if opened is not None and opened.writers and opened.fd >= 0:
            self._tell_extent(opened.fd, change)
        if opened is not None and opened.gone is not None:
            opened.gone = changed
        else:
            changed = changed._replace(sequence=pool.next_sequence())
            with pool.change(pool.counters._replace(sequence=changed.sequence)) as txn:
                txn.put_inode(ino, changed)
            self._identities.write(ino, changed)
        return self._blocks.present(ino)

    def _changed(self, record: InodeRecord, change: Change) -> InodeRecord:
        mode = record.mode
        if change.mode is not None:
            mode = storable_mode(stat.S_IFMT(mode) | stat.S_IMODE(change.mode))
        now_ns = self._pool.clock_ns()
        return record._replace(
            mode=mode,
            uid=record.uid if change.uid is None else change.uid,
            gid=record.gid if change.gid is None else change.gid,
            atime_ns=record.atime_ns if change.atime_ns is None else change.atime_ns,
            mtime_ns=record.mtime_ns if change.mtime_ns is None else change.mtime_ns,
            ctime_ns=now_ns,
        )

    def _tell_extent(self, fd: int, change: Change) -> None:
        """While a writer lives the extent tells the times, so it must hear them too."""
        if change.atime_ns is None and change.mtime_ns is None:
            return
        status = self._pool.syscalls.fstat(fd)
        atime_ns = status.st_atime_ns if change.atime_ns is None else change.atime_ns
        mtime_ns = status.st_mtime_ns if change.mtime_ns is None else change.mtime_ns
        self._pool.syscalls.utime(fd, ns=(atime_ns, mtime_ns))

    # ---- extended attributes ----

    def xattr(self, ino: InodeNo, name: bytes) -> bytes:
        """Return the value of *name*. Raises NoSuchAttribute, also for every other namespace."""
        value = self._pool.index.xattr(ino, name) if name.startswith(_USER_PREFIX) else None
        if value is None:
            raise NoSuchAttribute
        return value

    def xattr_names(self, ino: InodeNo) -> list[bytes]:
        """Return the names set on *ino*."""
        return self._pool.index.xattrs(ino)

    def set_xattr(self, ino: InodeNo, name: bytes, value: bytes) -> None:
        """Set user.* attribute *name*.

        Raises Unsupported for other namespaces, AttributeTooLarge beyond the settings' bounds,
        DeadInode also for an inode that is open but has no name: its attributes went with it.
        """
        settings = self._pool.settings
        self._require_settable(name)
        if len(value) > settings.xattr_value_max_bytes:
            raise AttributeTooLarge(f"{len(value)} bytes")
        record = self._namespace.record(ino)
        if self._blocks.is_gone(ino):
            raise DeadInode(f"inode {ino}")
        names = [other for other in self.xattr_names(ino) if other != name]
        total_bytes = sum(len(other) + len(self.xattr(ino, other)) for other in names)
        if total_bytes + len(name) + len(value) > settings.xattr_total_max_bytes:
            raise AttributeTooLarge(f"{total_bytes} bytes are set already")
        with self._pool.index.write() as txn:
            txn.put_xattr(ino, name, value)
            txn.put_inode(ino, record._replace(ctime_ns=self._pool.clock_ns()))

    def remove_xattr(self, ino: InodeNo, name: bytes) -> None:
        """Remove attribute *name*. Raises NoSuchAttribute, Unsupported, ReadOnly."""
        self._require_settable(name)
        self.xattr(ino, name)
        record = self._namespace.record(ino)
        with self._pool.index.write() as txn:
            txn.delete_xattr(ino, name)
            txn.put_inode(ino, record._replace(ctime_ns=self._pool.clock_ns()))

    def _require_settable(self, name: bytes) -> None:
        if self._pool.settings.read_only:
            raise ReadOnly
        if not name.startswith(_USER_PREFIX):
            raise Unsupported(f"attribute namespace of {name!r}")
        if not len(_USER_PREFIX) < len(name) <= _XATTR_NAME_MAX_BYTES:
            raise InvalidRequest(f"attribute name of {len(name)} bytes")
