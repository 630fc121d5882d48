"""Attributes: mode, owner, times and size of an inode, and its small user.* xattrs."""

import contextlib
import stat
from typing import Any, Final, NamedTuple

from kvfs.core.changed import NO_ATTRIBUTES, Changed, Why
from kvfs.core.directory_policy import NAMES
from kvfs.core.entitlements import entitled_directories
from kvfs.core.errors import (
    AttributeTooLarge,
    DeadInode,
    InvalidRequest,
    IsADirectory,
    NoSpace,
    NoSuchAttribute,
    ReadOnly,
    Unsupported,
    UsageError,
)
from kvfs.core.inode_rules import storable_mode
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.engine.blocks.blocks import Blocks
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.own_attributes import OwnAttributes, is_own
from kvfs.machine.process_limits import entitled_users
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.allocator import Allocator, require_node
from kvfs.pool.open.extent_bytes import measured
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

USER_PREFIX: Final = b"user."
#: linux/limits.h XATTR_NAME_MAX, which the kernel enforces, too.
_XATTR_NAME_MAX_BYTES: Final = 255


class NewAttributes(NamedTuple):
    """What a SETATTR changes; None leaves a field as it is. Times in ns since the epoch."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Attributes:
    """Changes attributes of the inodes of one pool."""

    def __init__(
        self, pool: Pool, namespace: Namespace, allocator: Allocator, blocks: Blocks
    ) -> None:
        self._pool = pool
        self._allocator = allocator
        self._namespace = namespace
        self._blocks = blocks
        self._own = OwnAttributes(pool, allocator.room)

    def change(self, ino: InodeNo, change: NewAttributes, maker: Maker = NOBODY) -> InodeRecord:
        """Apply *change* of process *maker* to *ino*; return its new record.

        Raises DeadInode, IsADirectory (size of a directory), TooLarge, ReadOnly.
        """
        pool = self._pool
        if pool.settings.read_only:
            raise ReadOnly
        self._blocks.last_closes.publish_now(ino)
        record = self._namespace.record(ino)
        if change.size_bytes is not None:
            if not stat.S_ISREG(record.mode):
                raise IsADirectory if stat.S_ISDIR(record.mode) else InvalidRequest
            self._blocks.truncate(ino, change.size_bytes, maker)
            record = self._namespace.record(ino)
        self._hand_on(ino, change)
        changed = self._changed(record, change)
        if change.atime_ns is not None:  # how UCM and llm-d say that a block is warm
            pool.rules.heat.touch(ino)
        opened = pool.open.inodes.get(ino)
        if opened is not None and opened.writers and opened.fd >= 0:
            if measured(pool.syscalls, opened, record) is not record:
                # A time other than the extent's shows that it was written, even after a crash.
                changed = changed._replace(mtime_ns=changed.mtime_ns ^ 1)
            self._tell_extent(opened, change)
        if opened is not None and opened.gone is not None:
            opened.lose_name(changed)
            pool.open.notes.changed(opened)
        else:
            changed = changed._replace(sequence=pool.counters.next_sequence)
            theirs = self._all_stored(ino) if changed.uid != record.uid else NO_ATTRIBUTES
            with pool.change(pool.counters._replace(sequence=changed.sequence)) as written:
                written.write(Changed(ino, record, changed, Why.SET, theirs, theirs))
        return self._blocks.present(ino)

    def _hand_on(self, ino: InodeNo, change: NewAttributes) -> None:
        """Give owner and mode also to the draft that took *ino*'s name and will replace it."""
        draft = self._bearer(ino)
        if draft == ino or (change.mode, change.uid, change.gid) == (None, None, None):
            return
        with contextlib.suppress(DeadInode):
            self.change(draft, NewAttributes(change.mode, change.uid, change.gid))

    def _changed(self, record: InodeRecord, change: NewAttributes) -> InodeRecord:
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

    def _tell_extent(self, opened: OpenInode, change: NewAttributes) -> None:
        """Set the times on the extent, too: while there is a writer, they are the valid ones."""
        if change.atime_ns is None and change.mtime_ns is None:
            return
        status = self._pool.syscalls.fstat(opened.fd)
        atime_ns = status.st_atime_ns if change.atime_ns is None else change.atime_ns
        mtime_ns = status.st_mtime_ns if change.mtime_ns is None else change.mtime_ns
        self._blocks.publishing.set_times(opened, (atime_ns, mtime_ns))

    def own_root(self, uid: int | None, gid: int | None, mode: int | None) -> None:
        """Set owner and mode of the root directory as the mount's options say.

        Raises UsageError if they differ on a read-only mount, which changes nothing.
        """
        record = self._namespace.directory(ROOT_INODE)
        wanted = record._replace(
            uid=record.uid if uid is None else uid,
            gid=record.gid if gid is None else gid,
            mode=record.mode if mode is None else stat.S_IFDIR | mode,
        )
        if wanted == record:
            return
        if self._pool.settings.read_only:
            raise UsageError(
                "a read-only mount keeps the root's owner and mode: leave uid, gid, mode out"
            )
        with self._pool.change(self._pool.counters) as change:
            change.write(Changed(ROOT_INODE, record, wanted, Why.SET))

    def entitle(self, settings: Settings) -> None:
        """Take over the quotas and weights in *settings*; those in attributes still come first.

        Raises UsageError for a user who does not exist.
        """
        tenants = self._pool.rules.tenants
        users, remarks = entitled_users(settings, self._pool.space.accounts.tenants)
        if remarks:
            raise UsageError(remarks[0])
        tenants.configure(users, entitled_directories(settings.tenants), settings.tenant_idle_s)
        if tenants.outdated:
            self._allocator.room.rank_anew()

    def describe_root(self) -> dict[str, Any]:
        """Return owner and mode of the root directory, for `kvfs status`."""
        record = self._namespace.directory(ROOT_INODE)
        return {"uid": record.uid, "gid": record.gid, "mode": f"{stat.S_IMODE(record.mode):04o}"}

    # ---- extended attributes ----

    def xattr(self, ino: InodeNo, name: bytes) -> bytes:
        """Return the value of *name*.

        Raises NoSuchAttribute, also for every other namespace, and DeadInode.
        """
        if is_own(name):
            self._blocks.last_closes.publish_now(ino)
            return self._own.value(ino, self._namespace.record(ino), name)
        ino = self._bearer(ino)
        if not name.startswith(USER_PREFIX):
            raise NoSuchAttribute
        value = self._stored(ino, name)
        if value is None:
            self._namespace.record(ino)  # the block may be evicted: DeadInode
            raise NoSuchAttribute
        return value

    def _stored(self, ino: InodeNo, name: bytes) -> bytes | None:
        gone = self._gone(ino)
        return self._pool.index.xattr(ino, name) if gone is None else gone.attributes.get(name)

    def _all_stored(self, ino: InodeNo) -> dict[bytes, bytes]:
        index = self._pool.index
        return {name: index.xattr(ino, name) or b"" for name in index.xattrs(ino)}

    def _gone(self, ino: InodeNo) -> OpenInode | None:
        """Return *ino* if it is open without a name; then its attributes are in memory."""
        opened = self._pool.open.inodes.get(ino)
        return opened if opened is not None and opened.gone is not None else None

    def xattr_names(self, ino: InodeNo) -> list[bytes]:
        """Return the names set on *ino*, without those that kvfs answers itself."""
        ino = self._bearer(ino)
        gone = self._gone(ino)
        names = self._pool.index.xattrs(ino) if gone is None else list(gone.attributes)
        if not names:
            self._namespace.record(ino)
        return [name for name in names if not is_own(name)]

    def bearers(self, ino: InodeNo) -> set[InodeNo]:
        """Return the inodes that get *ino*'s owner and mode: itself, and those that share its name.

        An old version may get a name again (``DisplacedDrafts.restore``).
        """
        old = self._blocks.truncating.old
        before = old.of(ino) if ino in old else None
        return {ino, self._bearer(ino), ino if before is None else before}

    def _bearer(self, ino: InodeNo) -> InodeNo:
        """Return the inode with *ino*'s attributes: *ino*, or the draft that took its name."""
        opened = self._pool.open.inodes.get(ino)
        return ino if opened is None or not opened.stands_in else opened.stands_in

    def set_xattr(
        self, ino: InodeNo, name: bytes, value: bytes, uid: int = 0, *, request: int = 0
    ) -> None:
        """Set user.* attribute *name* for user *uid*; *request* is the number of the request.

        Raises Unsupported for other namespaces, NotPermitted for policies on others' inodes,
        AttributeTooLarge beyond the settings' bounds, DeadInode also for a policy of an inode
        that is open but has no name.
        """
        settings = self._pool.settings
        ino = self._bearer(ino)
        self._require_settable(name)
        if len(value) > settings.xattr_value_max_bytes:
            raise AttributeTooLarge(f"{len(value)} bytes")
        require_node(self._pool, uid)  # before anything is evicted for it
        self._allocator.require_name()
        self._blocks.last_closes.publish_now(ino)
        record = self._namespace.record(ino)
        if is_own(name) and self._gone(ino) is not None:
            raise DeadInode(f"inode {ino}")
        names = [other for other in self.xattr_names(ino) if other != name]
        total_bytes = sum(len(other) + len(self.xattr(ino, other)) for other in names)
        if total_bytes + len(name) + len(value) > settings.xattr_total_max_bytes:
            raise AttributeTooLarge(f"{total_bytes} bytes are set already")
        pinned_bytes = self._own.check(ino, record, name, value, uid) if is_own(name) else 0
        self._store(ino, record, name, value, pinned_bytes, request)

    def remove_xattr(self, ino: InodeNo, name: bytes, uid: int = 0, *, request: int = 0) -> None:
        """Remove attribute *name*. Raises NoSuchAttribute, Unsupported, ReadOnly."""
        self._require_settable(name)
        ino = self._bearer(ino)
        self._blocks.last_closes.publish_now(ino)
        record = self._namespace.record(ino)
        present = self._stored(ino, name) is not None
        if is_own(name) and (present or name not in NAMES):
            self._own.check(ino, record, name, None, uid)
        if not present:
            raise NoSuchAttribute
        self._store(ino, record, name, None, 0, request)

    def _store(
        self,
        ino: InodeNo,
        record: InodeRecord,
        name: bytes,
        value: bytes | None,
        pinned_bytes: int,
        request: int,
    ) -> None:
        """Set attribute *name* of *ino* in the index, or in memory if *ino* has no name.

        A *value* of None removes it.
        """
        pool = self._pool
        changed = record._replace(ctime_ns=pool.clock_ns())
        gone = self._gone(ino)
        if gone is not None:
            kept = {key: held for key, held in gone.attributes.items() if key != name}
            if value is not None:
                kept[name] = value
            if not pool.open.notes.takes(ino, kept):
                raise NoSpace("too many attributes of files without a name")
            gone.keep_attributes(kept)
            gone.lose_name(changed)
            pool.open.notes.changed(gone)
            return
        before = pool.index.xattr(ino, name)
        lost = NO_ATTRIBUTES if before is None else {name: before}
        gained = NO_ATTRIBUTES if value is None else {name: value}
        changed = changed._replace(sequence=pool.counters.next_sequence)
        with pool.change(pool.counters._replace(sequence=changed.sequence)) as change:
            if value is None:
                change.txn.delete_xattr(ino, name)
            else:
                change.txn.put_xattr(ino, name, value)
            change.write(
                Changed(
                    ino, record, changed, Why.ATTRIBUTED, lost, gained, pinned_bytes=pinned_bytes
                )
            )
            change.does(request, ino)
        if is_own(name):
            self._own.changed(changed, name)

    def _require_settable(self, name: bytes) -> None:
        if self._pool.settings.read_only:
            raise ReadOnly
        if not name.startswith(USER_PREFIX):
            raise Unsupported(f"attribute namespace of {name!r}")
        if not len(USER_PREFIX) < len(name) <= _XATTR_NAME_MAX_BYTES:
            raise InvalidRequest(f"attribute name of {len(name)} bytes")
