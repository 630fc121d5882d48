"""One write transaction of the index: every change of a request, visible at once or not at all."""

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

import lmdb

from kvfs.errors import Damaged, NoSpace
from kvfs.index_errors import raise_index_error
from kvfs.records import (
    COUNTERS_KEY,
    UNFINISHED_KEY,
    Counters,
    child_key,
    inode_key,
    name_key,
    pack_counters,
    pack_inode,
    pack_name,
    pack_unfinished,
    parse_counters,
    parse_inode,
    parse_name,
    seal,
    unseal,
    xattr_key,
)
from kvfs.types import InodeNo, InodeRecord


class WriteTransaction:
    """Commits when its ``with`` block is left, aborts when an exception leaves it.

    Short by contract: no ``await`` inside, since the index has one writer at a time. Reads inside
    see what was written inside. Leaving raises NoSpace when the map or the file system is full,
    OSError when the device fails; nothing has changed then.
    """

    __slots__ = ("_commit", "_delete", "_env", "_full", "_get", "_put", "_txn")

    _txn: "lmdb.Transaction[bytes]"

    def __init__(
        self,
        env: lmdb.Environment,
        commit: Callable[[Any], None],
        full: Callable[[], bool],
    ) -> None:
        """Prepare a transaction of *env* that ends in *commit*; it begins at ``__enter__``.

        *full* tells after a failed commit whether the file system is full.
        """
        self._env = env
        self._commit = commit
        self._full = full

    def __enter__(self) -> Self:
        """Begin; waits while another thread writes. Raises NoSpace, OSError."""
        try:
            txn = self._env.begin(write=True)
        except lmdb.Error as error:
            raise_index_error(error)
        self._txn = txn
        self._get = txn.get
        self._put = txn.put
        self._delete = txn.delete
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit, or abort and translate the error."""
        if kind is None:
            try:
                self._commit(self._txn)
            except (lmdb.Error, OSError) as failure:
                self._txn.abort()
                # LMDB calls a short write, the first sign of a full file system, EIO.
                if isinstance(failure, lmdb.Error) and self._full():
                    raise NoSpace(f"index: {failure}") from failure
                raise_index_error(failure)
            except BaseException:
                self._txn.abort()
                raise
            return
        self._txn.abort()
        if isinstance(error, lmdb.Error):
            raise_index_error(error)

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
        self._put(inode_key(ino), pack_inode(record))

    def delete_inode(self, ino: InodeNo) -> None:
        """Remove the record of *ino*, if there is one."""
        self._delete(inode_key(ino))

    def put_name(self, parent: InodeNo, name: bytes, ino: InodeNo) -> None:
        """Make *name* in *parent* lead to *ino*, for lookup and for readdir.

        When the name led elsewhere before, ``delete_name`` comes first: the readdir row of the
        former inode has a key of its own.
        """
        key = name_key(parent, name)
        self._put(key, pack_name(key, ino))
        key = child_key(parent, ino)
        self._put(key, seal(key, name))

    def delete_name(self, parent: InodeNo, name: bytes, ino: InodeNo) -> None:
        """Remove what ``put_name`` of the same arguments wrote."""
        self._delete(name_key(parent, name))
        self._delete(child_key(parent, ino))

    def put_xattr(self, ino: InodeNo, name: bytes, value: bytes) -> None:
        """Set an extended attribute."""
        key = xattr_key(ino, name)
        self._put(key, seal(key, value))

    def delete_xattr(self, ino: InodeNo, name: bytes) -> bool:
        """Remove an extended attribute; return whether it was set."""
        return self._delete(xattr_key(ino, name))

    def delete_xattrs(self, ino: InodeNo) -> None:
        """Remove every extended attribute of *ino*."""
        prefix = xattr_key(ino, b"")
        with self._txn.cursor() as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                found = cursor.delete()

    def put_counters(self, counters: Counters) -> None:
        """Write the counters."""
        self._put(COUNTERS_KEY, pack_counters(counters))

    def put_unfinished(self, inos: Collection[InodeNo]) -> None:
        """Write which inodes are drafts or being rewritten; too many nobody needs to know."""
        self._put(UNFINISHED_KEY, pack_unfinished(inos))

    def delete_row(self, key: bytes) -> None:
        """Remove the row *key* of any keyspace: for fsck, which finds rows nobody can read."""
        self._delete(key)
