"""One write transaction of the index: every change of a request, visible at once or not at all.

It collects rows in memory and passes them to LMDB at its commit, all at once, together with the
waiting rows of earlier transactions (``PendingRows``). What is committed waits for the log on the
device (``UnloggedRows``).
"""

import contextlib
import errno
import threading
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Final, Self

import lmdb

from kvfs.core.errors import Damaged
from kvfs.core.records import (
    COUNTERS_KEY,
    RECONCILE_KEY,
    UNFINISHED_KEY,
    Counters,
    Doubt,
    DriveCount,
    child_key,
    drive_key,
    inode_key,
    name_key,
    pack_counters,
    pack_doubt,
    pack_drive_count,
    pack_inode,
    pack_name,
    pack_unfinished,
    parse_counters,
    parse_inode,
    parse_name,
    parse_xattr_key,
    seal,
    unseal,
    xattr_key,
)
from kvfs.core.types import DriveNo, InodeNo, InodeRecord
from kvfs.storage.lmdb_file import raise_index_error

#: Rows by key; None for a row that is to be removed.
Rows = dict[bytes, bytes | None]
#: The request that a transaction carries out (FUSE's number of it), and the inode that it creates.
Deed = tuple[int, InodeNo]
ABSENT: Final = b""
#: With more waiting rows than this the next transaction is committed, lasting or not.
PENDING_MAX: Final = 1024
RECORDS_MAX: Final = 4096


class WriteTransaction:
    """Commits at the end of its ``with`` block; drops all changes if an exception leaves it.

    Short by contract: no ``await`` inside, since the index has one writer at a time. Reads inside
    see what was written inside. The commit raises NoSpace when the map or the file system is full,
    OSError when the device fails; nothing has changed then.
    """

    __slots__ = ("_commit", "_keys", "_one", "_read", "_records", "_rows", "deed")

    def __init__(
        self,
        read: Callable[[bytes], bytes | None],
        keys: Callable[[bytes], list[bytes]],
        commit: Callable[[Rows, dict[bytes, InodeRecord], Deed | None], None],
        one: threading.Lock,
    ) -> None:
        """*read* returns the row of a key, *keys* all keys with a prefix.

        *commit* commits rows; *one* is held from the begin to the end.
        """
        self._one = one
        self._read = read
        self._keys = keys
        self._commit = commit
        self._rows: Rows = {}
        #: The records from which the inode rows were packed, by key.
        self._records: dict[bytes, InodeRecord] = {}
        #: The client's request that this transaction carries out, so that it is not done twice.
        self.deed: Deed | None = None

    def __enter__(self) -> Self:
        """Begin. Raises OSError inside another transaction, whose rows it would not see."""
        if not self._one.acquire(blocking=False):
            raise OSError(errno.EDEADLK, "index: a transaction inside a transaction")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit, or drop all changes and translate LMDB's error."""
        self._one.release()
        if kind is None:
            self._commit(self._rows, self._records, self.deed)
        elif isinstance(error, lmdb.Error):
            raise_index_error(error)

    def _get(self, key: bytes) -> bytes | None:
        raw = self._rows.get(key, ABSENT)
        return self._read(key) if raw is ABSENT else raw

    def lookup(self, parent: InodeNo, name: bytes) -> InodeNo | None:
        """Return the inode that *name* in *parent* leads to; raises Damaged."""
        key = name_key(parent, name)
        raw = self._get(key)
        return None if raw is None else parse_name(key, raw)

    def inode(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino*; raises Damaged."""
        raw = self._get(inode_key(ino))
        return None if raw is None else parse_inode(raw)

    def xattr(self, ino: InodeNo, name: bytes) -> bytes | None:
        """Return the value of an extended attribute; raises Damaged."""
        key = xattr_key(ino, name)
        raw = self._get(key)
        return None if raw is None else unseal(key, raw)

    def counters(self) -> Counters:
        """Return the counters as this transaction sees them; raises Damaged."""
        raw = self._get(COUNTERS_KEY)
        if raw is None:
            raise Damaged("index: the counters row is missing")
        return parse_counters(raw)

    def put_inode(self, ino: InodeNo, record: InodeRecord) -> None:
        """Write the record of *ino*, new or not."""
        key = inode_key(ino)
        self._rows[key] = pack_inode(record)
        self._records[key] = record

    def delete_inode(self, ino: InodeNo) -> None:
        """Remove the record of *ino*, if there is one."""
        self.delete_row(inode_key(ino))

    def put_name(self, parent: InodeNo, name: bytes, ino: InodeNo) -> None:
        """Make *name* in *parent* lead to *ino*, for lookup and for readdir.

        If the name led to another inode before, call ``delete_name`` first: the readdir row of that
        inode has a key of its own.
        """
        key = name_key(parent, name)
        self._rows[key] = pack_name(key, ino)
        key = child_key(parent, ino)
        self._rows[key] = seal(key, name)

    def lead_name(self, parent: InodeNo, name: bytes, ino: InodeNo) -> None:
        """Make a lookup of *name*, which readdir lists as that of an alias, lead to block *ino*."""
        key = name_key(parent, name)
        self._rows[key] = pack_name(key, ino)

    def delete_name(self, parent: InodeNo, name: bytes, ino: InodeNo) -> None:
        """Remove what ``put_name`` of the same arguments wrote."""
        self._rows[name_key(parent, name)] = None
        self._rows[child_key(parent, ino)] = None

    def put_xattr(self, ino: InodeNo, name: bytes, value: bytes) -> None:
        """Set an extended attribute."""
        key = xattr_key(ino, name)
        self._rows[key] = seal(key, value)

    def delete_xattr(self, ino: InodeNo, name: bytes) -> bool:
        """Remove an extended attribute; return whether it was set."""
        key = xattr_key(ino, name)
        was_set = self._get(key) is not None
        self._rows[key] = None
        return was_set

    def delete_xattrs(self, ino: InodeNo) -> dict[bytes, bytes]:
        """Remove every extended attribute of *ino*; return name and value of those readable."""
        prefix = xattr_key(ino, b"")
        written = [key for key in self._rows if key.startswith(prefix)]
        values: dict[bytes, bytes] = {}
        for key in written + self._keys(prefix):
            with contextlib.suppress(Damaged):
                name = parse_xattr_key(key)[1]
                if (value := self.xattr(ino, name)) is not None:
                    values[name] = value
            self._rows[key] = None
        return values

    def put_counters(self, counters: Counters) -> None:
        """Write the counters."""
        self._rows[COUNTERS_KEY] = pack_counters(counters)

    def put_drive_counts(self, counts: Mapping[DriveNo, DriveCount]) -> None:
        """Write what drives from 1 on hold."""
        for drive, count in counts.items():
            self._rows[drive_key(drive)] = pack_drive_count(drive, count)

    def put_unfinished(self, inos: Collection[InodeNo]) -> None:
        """Write which inodes are drafts or being rewritten; if too many, write just that fact."""
        self._rows[UNFINISHED_KEY] = pack_unfinished(inos)

    def put_doubt(self, doubt: Doubt | None) -> None:
        """Write which inodes are still to be compared with their files; None: none is."""
        self._rows[RECONCILE_KEY] = None if doubt is None else pack_doubt(doubt)

    def delete_row(self, key: bytes) -> None:
        """Remove the row *key* of any keyspace: for fsck, which finds unreadable rows."""
        self._rows[key] = None
        self._records.pop(key, None)

    def enter_logged(self, rows: Rows) -> None:
        """Write *rows* of any keyspace as they are: those of a log."""
        self._rows.update(rows)


class PendingRows(dict[bytes, bytes | None]):
    """Rows that every read sees but that LMDB does not have yet; None for a row to be removed.

    The creation and removal of a draft need not survive a killed server: an extent without a row is
    a stray, which the next start removes. So its rows wait here for a transaction that must last
    (the rename that publishes it) or for the next tick. A store by rename then costs one commit
    instead of three, and a draft that is created and removed meanwhile costs none.
    """

    def keys_after(self, committed: list[bytes], prefix: bytes) -> list[bytes]:
        """Return all keys with *prefix*, given those that LMDB has (*committed*)."""
        found = [key for key in committed if self.get(key, b"") is not None]
        found += [key for key, raw in self.items() if raw is not None and key.startswith(prefix)]
        return found

    def with_rows(self, rows: Rows) -> Rows:
        """Return all rows that a commit of *rows* writes."""
        return {**self, **rows} if self else rows


class RecordCache(dict[bytes, InodeRecord]):
    """Parsed inode records, recently read or written: a store reads its directory's six times.

    This process is the index's only writer, so a record here is the current one, pending rows
    included. Bounded by count; a record takes some 600 bytes.
    """

    def remember(self, key: bytes, record: InodeRecord) -> None:
        """Keep *record*; if the cache is full, drop the oldest one."""
        if len(self) >= RECORDS_MAX:
            del self[next(iter(self))]
        self[key] = record

    def learn(self, rows: Rows, records: dict[bytes, InodeRecord]) -> None:
        """Drop the records that *rows* changed, and keep the new *records*."""
        for key in rows:
            if key in self:
                del self[key]
        self.update(records)
        while len(self) > RECORDS_MAX:
            del self[next(iter(self))]


class UnloggedRows:
    """Rows that were committed and are not in the log yet; each is here once, as it is now."""

    def __init__(self, most_bytes: int) -> None:
        """With more than *most_bytes* of rows all are dropped (``overflowed``)."""
        self._most_bytes = most_bytes
        self._rows: Rows = {}
        #: How much was noted; rows that were written again count again.
        self.size_bytes = 0
        #: Whether rows were dropped: the log lacks them.
        self.overflowed = False

    def learn(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Keep *rows*, which were just committed."""
        self._rows.update(rows)
        for key, value in rows.items():
            self.size_bytes += len(key) + (0 if value is None else len(value))
        if self.size_bytes > self._most_bytes:
            self.drop()
            self.overflowed = True

    def pop(self) -> Rows:
        """Return all rows, and forget them."""
        rows, self._rows, self.size_bytes = self._rows, {}, 0
        return rows

    def drop(self) -> None:
        """Forget all rows."""
        self._rows, self.size_bytes = {}, 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._rows)
