"""The index: names, inodes, extended attributes and counters in one LMDB database.

Synchronous on purpose (a commit takes about 10 us, a thread hop 55 us): only ``sync`` and
``preallocate`` may block and belong in a thread. Every read call begins and ends its own read
transaction, so none lives across an ``await``. It handles keys and records, not their meaning.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Final, Self

import lmdb

from kvfs.core.errors import Damaged, Exists, NoSpace
from kvfs.core.index_room import COMMITS_PER_LOOK, IndexRoom, mapped_bytes
from kvfs.core.pool_layout import DATA_NAME
from kvfs.core.records import (
    COUNTERS_KEY,
    FORMAT_KEY,
    INDEX_FORMAT,
    RECONCILE_KEY,
    UNFINISHED_KEY,
    Counters,
    Doubt,
    child_key,
    inode_key,
    name_key,
    pack_counters,
    pack_format,
    parse_child_key,
    parse_counters,
    parse_doubt,
    parse_inode,
    parse_name,
    parse_unfinished,
    parse_xattr_key,
    unseal,
    xattr_key,
)
from kvfs.core.settings import Settings
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.storage.index_transaction import (
    ABSENT,
    PENDING_MAX,
    Deed,
    PendingRows,
    RecordCache,
    Rows,
    UnloggedRows,
    WriteTransaction,
)
from kvfs.storage.journal import Commits, Journal
from kvfs.storage.lmdb_file import (
    SPARE_PAGES,
    IndexFile,
    allocate_lock_file,
    check_data_file,
    check_format,
    committed_rows,
    open_environment,
    raise_index_error,
    rows_bytes,
)
from kvfs.storage.row_log import HeldIndex
from kvfs.storage.syscalls import Syscalls

_DEFAULTS: Final = Settings()


class Index:
    """One open index: one process at a time, one writing thread.

    A read raises Damaged when a record fails its checksum or LMDB's tree is broken there, unless
    it says otherwise.
    """

    def __init__(
        self,
        path: str,
        *,
        map_size_bytes: int = _DEFAULTS.index_map_bytes,
        preallocate_bytes: int = _DEFAULTS.index_preallocate_bytes,
        read_only: bool = False,
        syscalls: Syscalls | None = None,
        journal: Journal | None = None,
        unlogged: UnloggedRows | None = None,
        in_memory: bool = False,
    ) -> None:
        """Open the index in directory *path*; unless *read_only*, allocate space ahead.

        The *journal* keeps rows that wait for a commit, and has those of a killed server.
        *unlogged* is told of each row that was committed. If it is *in_memory*, no block that is
        evicted makes room for a larger file: names must go.

        A read-only index writes nothing at all, no lock file either: the caller holds the pool's
        LOCK. An index opens also on a full file system; ``preallocation_due`` stays true. Raises
        IndexDamaged, FormatUnknown, ToolMissing (no address space for the map), NoSpace (no lock
        file and no space for it), OSError.
        """
        self._syscalls = syscalls if syscalls is not None else Syscalls()
        self._commits_to_look = 0
        self._file: IndexFile | None = None
        self._pending = PendingRows()
        self.records: Final = RecordCache()
        #: Held while a transaction is open: it would not see the rows of another.
        self._one_writer = threading.Lock()
        #: Held by commits, and by reads in other threads. A read pins the pages freed meanwhile,
        #: and may wait for the GIL during a hundred commits: a nearly full map would fill up.
        self._unread = threading.Lock()
        used_bytes = check_data_file(path, spare_pages=0 if read_only else SPARE_PAGES)
        map_bytes = mapped_bytes(map_size_bytes, used_bytes)
        with contextlib.ExitStack() as parts:
            if not read_only:
                self._file = IndexFile(path, preallocate_bytes, map_bytes, self._syscalls)
                parts.callback(self._file.close)
                self._file.cover(used_bytes)
            # Checked read-only first, so that an index that is refused stays unchanged.
            check_format(path, map_size_bytes)
            if not read_only:
                allocate_lock_file(path, self._syscalls)
            self._env = open_environment(path, map_bytes, read_only=read_only)
            parts.callback(self._env.close)
            self._begin = self._env.begin
            self._page_bytes: int = self._env.stat()["psize"]
            if self._file is not None:
                with contextlib.suppress(NoSpace):
                    self._file.allocate(self.used_bytes())
            file_end_bytes = None if self._file is None else self._file.rows_end_bytes
            self.room = IndexRoom(map_size_bytes, partial(rows_bytes, self._env), file_end_bytes)
            self._journal, self._unlogged = journal, unlogged
            self._in_memory = in_memory
            self._commits = Commits(self._env, self._syscalls, self._file, journal)
            if journal is not None:
                self._pending.update(journal.waiting(self.transaction()))
            self._parts = parts.pop_all()

    @classmethod
    def create(
        cls,
        path: str,
        map_size_bytes: int = _DEFAULTS.index_map_bytes,
        *,
        preallocate_bytes: int = _DEFAULTS.index_preallocate_bytes,
        syscalls: Syscalls | None = None,
    ) -> None:
        """Make an empty index in directory *path*, which is created if missing; durable on return.

        Raises Exists when there is one already, ToolMissing, NoSpace, OSError.
        """
        calls = syscalls if syscalls is not None else Syscalls()
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.path.lexists(f"{path}/{DATA_NAME}"):
            raise Exists(f"index: {DATA_NAME} is there already")
        allocate_lock_file(path, calls)
        env = open_environment(path, map_size_bytes, read_only=False)
        try:
            whole = IndexFile(path, preallocate_bytes, map_size_bytes, calls)
            with contextlib.closing(whole) as file:
                file.allocate(0, whole=True)
            txn = env.begin(write=True)
            txn.put(FORMAT_KEY, pack_format(INDEX_FORMAT))
            txn.put(COUNTERS_KEY, pack_counters(Counters()))
            calls.commit(txn)
            env.sync(True)
        except (lmdb.Error, OSError) as error:
            raise_index_error(error)
        finally:
            env.close()

    def close(self) -> None:
        """Close the index; nothing is synced. Idempotent."""
        with contextlib.suppress(NoSpace, OSError):
            self.settle()
        self._parts.close()

    def __enter__(self) -> Self:
        """Return the index itself, to be closed when the block is left."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def lookup(self, parent: InodeNo, name: bytes) -> InodeNo | None:
        """Return the inode that *name* in directory *parent* leads to, None if there is no name."""
        key = name_key(parent, name)
        raw = self._get(key)
        return None if raw is None else parse_name(key, raw)

    def inode(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino*, None if there is none."""
        key = inode_key(ino)
        record = self.records.get(key)
        if record is None:
            raw = self._get(key)
            if raw is None:
                return None
            record = parse_inode(raw)
            self.records.remember(key, record)
        return record

    def inode_or_miss(self, ino: InodeNo) -> InodeRecord | None:
        """Return the record of *ino*, None if it is missing or damaged. For callers that can go on.

        The next lookup of its name reports the damage (pool_change.py).
        """
        try:
            return self.inode(ino)
        except Damaged:
            return None

    def still(self, key: bytes, record: InodeRecord) -> bool:
        """Whether the cache has *record* itself under *key* (``inode_key``); reads no pages.

        False proves nothing: call ``inode`` then.
        """
        return self.records.get(key) is record

    def knows(self, ino: InodeNo) -> bool:
        """Whether *ino* has a record, even one that cannot be read: fsck decides about those.

        May be called in any thread, but outside the writing one the answer may be outdated. Other
        threads must not use ``inode``: they could put a record into the cache that the writer has
        replaced meanwhile.
        """
        try:
            with self._unread:
                return self._get(inode_key(ino)) is not None
        except Damaged:
            return True

    def children(self, parent: InodeNo, after: InodeNo, limit: int) -> list[tuple[InodeNo, bytes]]:
        """Return up to *limit* (inode, name) of *parent*, by inode number, above *after*.

        The inode number is the readdir cookie: names that are added or removed do not shift others.
        """
        prefix = child_key(parent, InodeNo(0))[:-8]
        return [
            (parse_child_key(key)[1], unseal(key, raw))
            for key, raw in self._rows(child_key(parent, InodeNo(after + 1)), prefix, limit)
        ]

    def xattr(self, ino: InodeNo, name: bytes) -> bytes | None:
        """Return the value of extended attribute *name* of *ino*, None if it is not set."""
        key = xattr_key(ino, name)
        raw = self._get(key)
        return None if raw is None else unseal(key, raw)

    def xattrs(self, ino: InodeNo) -> list[bytes]:
        """Return the names of the extended attributes of *ino*, sorted."""
        prefix = xattr_key(ino, b"")
        return [parse_xattr_key(key)[1] for key, _ in self._rows(prefix, prefix, None)]

    def walk(
        self, prefix: bytes, step: int, *, after: bytes = b"", committed: bool = False
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the rows whose keys begin with *prefix* and sort above *after*, *step* at a time.

        Each list is read in its own transaction, so rows may change in between. With *committed*
        waiting rows are left out, and the call may be made in any thread.
        """
        read = self._committed_rows if committed else self._rows
        while rows := read(max(prefix, after + b"\0" if after else b""), prefix, step):
            after = rows[-1][0]
            yield rows

    def below(self, directory: InodeNo, step: int) -> Iterator[list[tuple[InodeNo, bytes]]]:
        """Yield all that ``children`` of *directory* returns, up to *step* at a time."""
        after = InodeNo(0)
        while found := self.children(directory, after, step):
            after = found[-1][0]
            yield found

    def counters(self) -> Counters:
        """Return the counters row."""
        raw = self._get(COUNTERS_KEY)
        if raw is None:
            raise Damaged("index: the counters row is missing")
        return parse_counters(raw)

    def unfinished(self) -> list[InodeNo] | None:
        """Return the inodes that are drafts or being rewritten, maybe some more; None: unknown."""
        raw = self._get(UNFINISHED_KEY)
        try:
            return None if raw is None else parse_unfinished(raw)
        except Damaged:
            return None

    def doubt(self) -> Doubt | None:
        """Return which inodes are still to be compared with files, None if none. Raises Damaged."""
        raw = self._get(RECONCILE_KEY)
        return None if raw is None else parse_doubt(raw)

    def write(self, *, lasting: bool = True) -> WriteTransaction:
        """Return a write transaction, to be used in a ``with`` statement.

        One that is not *lasting* is visible to every read at once, but a killed process may lose
        it: it is committed with the next lasting one, or by ``settle``.
        """
        commit = self._keep if lasting else self._defer
        return WriteTransaction(self._get, self._keys, commit, self._one_writer)

    def settle(self) -> None:
        """Commit what was written by transactions that are not lasting. Raises NoSpace, OSError."""
        if self._pending:
            self._commit({})

    def forget_pending(self) -> None:
        """Drop the rows that wait for a commit, because the device is gone."""
        self._pending.clear()

    def used_bytes(self) -> int:
        """Return how many bytes of data.mdb LMDB has ever used, including pages freed since."""
        last_page: int = self._env.info()["last_pgno"]
        return (last_page + 1) * self._page_bytes

    def preallocation_due(self) -> bool:
        """Whether ``preallocate`` should run; cheap enough to ask after every request.

        True at most once in 64 commits, so that a full file system is not asked in a loop.
        """
        if self._commits_to_look > 0 or self._file is None:
            return False
        self._commits_to_look = COMMITS_PER_LOOK
        return self._file.due(self.used_bytes())

    def preallocate(self) -> None:
        """Allocate space ahead of use; may run in a thread. Raises NoSpace, OSError."""
        if self._file is None:
            return
        try:
            self._file.allocate(self.used_bytes())
        except NoSpace:
            if self._in_memory:
                self.room.bind(self._file.rows_end_bytes())
            raise
        self.room.bind(None)

    def transaction(self) -> int:
        """Return the number of the last commit."""
        number: int = self._env.info()["last_txnid"]
        return number

    def hold(self) -> HeldIndex:
        """Commit waiting rows, and hold that commit until its ``end``; call that before ``close``.

        Meanwhile freed pages are not used again, so the file grows. Raises NoSpace, Damaged,
        OSError.
        """
        self.settle()
        return HeldIndex(self._env)

    def sync(self) -> None:
        """Write everything committed to the device. It blocks for some 20 ms: use a thread.

        Call ``settle`` first. Raises OSError.
        """
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise_index_error(error)

    def _get(self, key: bytes) -> bytes | None:
        raw: bytes | None = self._pending.get(key, ABSENT)
        if raw is not ABSENT:
            return raw
        try:
            txn = self._begin()
            raw = txn.get(key)
            # Ends the transaction at once; until the garbage collector did so, the pages it pins
            # could not be used again.
            txn.abort()
        except lmdb.Error as error:
            raise_index_error(error)
        return raw

    def _require_room(self, rows: Rows) -> None:
        """Raise NoSpace if *rows* add a name: the last look found no space for one."""
        try:
            self.room.require(rows)
        except NoSpace:
            self.preallocate()  # names came faster than the checks
            self.room.measure()
            self.room.require(rows)

    def _defer(
        self, rows: Rows, records: dict[bytes, InodeRecord], deed: Deed | None = None
    ) -> None:
        if self.room.crowded:
            self._require_room(rows)
        journal, full = self._journal, len(self._pending) >= PENDING_MAX
        if full or (journal is not None and not journal.keep(rows, deed)):
            self._commit(rows, deed)
        else:
            self._pending.update(rows)
        self.records.learn(rows, records)

    def _keep(
        self, rows: Rows, records: dict[bytes, InodeRecord], deed: Deed | None = None
    ) -> None:
        if self.room.crowded:
            self._require_room(rows)
        self._commit(rows, deed)
        self.records.learn(rows, records)

    def _commit(self, rows: Rows, deed: Deed | None = None) -> None:
        """Commit *rows* and all waiting ones in one transaction; on failure those still wait."""
        self._commits_to_look -= 1
        rows = self._pending.with_rows(rows)
        with self._unread:
            self._commits.write(rows, deed)
        if self._unlogged is not None:
            self._unlogged.learn(rows)
        self._pending.clear()
        self.room.note_commit()

    def _keys(self, prefix: bytes) -> list[bytes]:
        """Return the keys with *prefix*, without committing waiting rows."""
        rows = committed_rows(self._env, prefix, prefix, None)
        if not (rows or self._pending):
            return []  # most blocks have no attribute
        return self._pending.keys_after([key for key, _ in rows], prefix)

    def _rows(self, start: bytes, prefix: bytes, limit: int | None) -> list[tuple[bytes, bytes]]:
        self.settle()  # rare, so it is not worth merging waiting and committed rows
        return committed_rows(self._env, start, prefix, limit)

    def _committed_rows(self, start: bytes, prefix: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        with self._unread:
            return committed_rows(self._env, start, prefix, limit)
