"""What must outlive a killed server and is not in LMDB: waiting rows, and which requests were done.

It is in shared memory (a memfd), which the supervisor holds open, too. A server that takes over the
mount finds here the rows that wait for a commit (``PendingRows``), and the requests that were
carried out and may not have been answered. A request is identified by the kernel's number (unique
in struct fuse_in_header), 0 for none.

The process may be killed between any two stores to memory. So the last store makes a record valid:
its length, of eight aligned bytes. Waiting rows name the commit that they follow; the next commit
includes them, and makes them invalid. A change that is committed at once is announced before, with
the number that its commit will have. Each commit is one LMDB transaction (``Commits``).
"""

import errno
import marshal
import mmap
import os
import struct
from typing import Final

import lmdb

from kvfs.core.errors import NoSpace
from kvfs.core.types import InodeNo
from kvfs.storage.index_map import STATE
from kvfs.storage.index_transaction import Deed, Rows
from kvfs.storage.lmdb_file import IndexFile, raise_index_error
from kvfs.storage.shared_table import ALIGNED_BYTES, ENDS, WORD, begin_table, require_table
from kvfs.storage.syscalls import Syscalls

#: Incremented when the layout, or what marshal writes, changes.
JOURNAL_VERSION: Final = 1
_JOURNAL_MAGIC: Final = b"KVFSJRNL"
#: Set in the number of a request that the kernel sent again (FUSE_UNIQUE_RESEND, linux/fuse.h).
RESENT: Final = 1 << 63
_NUMBER_MASK: Final = RESENT - 1

#: A request is answered right after its commit, so few are unanswered at a time.
_DEEDS: Final = 64
_DEEDS_START: Final = 4096
#: Number of the commit (0: the rows are kept here), inode, request; the request is stored last.
_DEED: Final = struct.Struct("=QQQ")
_REQUEST_OFFSET: Final = 16
_WAITING_START: Final = 8192
_JOURNAL_BYTES: Final = 4 << 20
#: Commit that the rows follow, inode, request; then the rows, as marshal writes them.
_FOLLOWS: Final = struct.Struct("=QQQ")
#: Every Python since 2.5 writes bytes, None and dicts of them in the same way.
MARSHAL_VERSION: Final = 2
_NO_DEED: Final[Deed] = (0, InodeNo(0))


class Journal:
    """The journal in one memfd; one process at a time writes it, on one thread."""

    def __init__(self, fd: int) -> None:
        """Use the journal in *fd*, initialised if it is empty. Raises FormatUnknown."""
        self._at = _WAITING_START
        self._transaction = 0
        self._next_deed = 0
        found = os.fstat(fd).st_size
        if not found:
            os.ftruncate(fd, _JOURNAL_BYTES)
        self._memory = memory = mmap.mmap(fd, found or _JOURNAL_BYTES)
        if not found:
            begin_table(memory, _JOURNAL_MAGIC, JOURNAL_VERSION)
        require_table(memory, _JOURNAL_MAGIC, JOURNAL_VERSION, "journal")

    def close(self) -> None:
        """Unmap the memory; the supervisor may keep it alive."""
        self._memory.close()

    # ---- what the last server left ----

    def waiting(self, transaction: int) -> Rows:
        """Return the rows that wait after *transaction*, the last commit; they stay waiting."""
        self._transaction, self._at = transaction, _WAITING_START
        rows: Rows = {}
        for at, end in self._records():
            rows.update(marshal.loads(self._memory[at + _FOLLOWS.size : end]))
            self._at = end
        return rows

    def done(self) -> dict[int, InodeNo]:
        """Return the requests that are done, and the inode each made. Call ``waiting`` before."""
        found: dict[int, InodeNo] = {}
        latest = 0
        for number in range(_DEEDS):
            transaction, ino, request = _DEED.unpack_from(
                self._memory, _DEEDS_START + number * _DEED.size
            )
            request &= _NUMBER_MASK
            if request > latest:  # the next deed goes after the newest, over the oldest
                latest, self._next_deed = request, (number + 1) % _DEEDS
            if transaction <= self._transaction:
                found[request] = InodeNo(ino)
        for at, _ in self._records():
            _, ino, request = _FOLLOWS.unpack_from(self._memory, at)
            found[request & _NUMBER_MASK] = InodeNo(ino)
        found.pop(0, None)
        return found

    def _records(self) -> list[tuple[int, int]]:
        """Return start and end, without its length, of each record that follows the last commit."""
        found: list[tuple[int, int]] = []
        at = _WAITING_START
        while at + ALIGNED_BYTES <= len(self._memory):
            (length_bytes,) = WORD.unpack_from(self._memory, at)
            start, end = at + ALIGNED_BYTES, at + ALIGNED_BYTES + length_bytes
            if length_bytes < _FOLLOWS.size or end > len(self._memory):
                break
            if _FOLLOWS.unpack_from(self._memory, start)[0] != self._transaction:
                break
            found.append((start, end))
            at = end
        return found

    # ---- what this one does ----

    def keep(self, rows: Rows, deed: Deed | None) -> bool:
        """Keep waiting *rows*, and the *deed* that they do; False if there is no room."""
        ino_request = _NO_DEED if deed is None else deed
        body = _FOLLOWS.pack(self._transaction, ino_request[1], ino_request[0]) + marshal.dumps(
            rows, MARSHAL_VERSION
        )
        body += ENDS[len(body) & 7]
        start = self._at + ALIGNED_BYTES
        end = start + len(body)
        if end > _JOURNAL_BYTES:
            return False
        # An older record's length may be there, which would make a half-written body valid.
        WORD.pack_into(self._memory, self._at, 0)
        self._memory[start:end] = body
        WORD.pack_into(self._memory, self._at, len(body) - ALIGNED_BYTES)
        self._at = end - ALIGNED_BYTES
        if deed is not None:
            self.intend(deed, 0)
        return True

    def intend(self, deed: Deed, transaction: int) -> None:
        """Note that *transaction*, the next commit, does *deed*; 0: kept rows have done it."""
        request, ino = deed
        offset = _DEEDS_START + self._next_deed * _DEED.size
        _DEED.pack_into(self._memory, offset, transaction, ino, request)
        self._next_deed = (self._next_deed + 1) % _DEEDS

    def withdraw(self) -> None:
        """Note that the commit that was announced last has failed."""
        last = (self._next_deed - 1) % _DEEDS
        WORD.pack_into(self._memory, _DEEDS_START + last * _DEED.size + _REQUEST_OFFSET, 0)

    def committed(self, transaction: int) -> None:
        """Note that *transaction* was committed, with all rows that waited."""
        if transaction == self._transaction:  # the rows changed nothing: LMDB made no new commit
            WORD.pack_into(self._memory, _WAITING_START, 0)
        self._transaction, self._at = transaction, _WAITING_START


class Commits:
    """Commits rows to one environment; the journal records which request a commit does."""

    def __init__(
        self,
        env: lmdb.Environment,
        syscalls: Syscalls,
        file: IndexFile | None,
        journal: Journal | None,
    ) -> None:
        """*file* is data.mdb, None if the index is read-only; *journal* is told of each commit."""
        self._env: Final = env
        self._syscalls: Final = syscalls
        self._file: Final = file
        self._journal: Final = journal

    def write(self, rows: Rows, deed: Deed | None) -> None:
        """Commit *rows*, which include all waiting ones and do *deed*. Raises NoSpace, OSError.

        Raises Damaged where LMDB's tree is broken.
        """
        if STATE.lost:
            raise OSError(errno.EIO, "index: its pages cannot be read any more")
        try:
            txn = self._env.begin(write=True)
        except lmdb.Error as error:
            raise_index_error(error)
        try:
            for key, value in rows.items():
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, value)
            if STATE.lost:  # meanwhile: LMDB has read pages that are not the index's
                raise OSError(errno.EIO, "index: its pages cannot be read any more")
            self._end(txn, deed)
        except (lmdb.Error, OSError) as failure:
            txn.abort()
            # LMDB calls a short write, the first sign of a full file system, EIO.
            if isinstance(failure, lmdb.Error) and self._file and self._file.full():
                raise NoSpace(f"index: {failure}") from failure
            raise_index_error(failure)
        except BaseException:
            txn.abort()
            raise

    def _end(self, txn: lmdb.Transaction, deed: Deed | None) -> None:
        """Commit *txn*, and tell the journal. Raises lmdb.Error, OSError."""
        journal = self._journal
        if journal is None:
            self._syscalls.commit(txn)
            return
        if deed is not None:
            journal.intend(deed, txn.id())
        try:
            self._syscalls.commit(txn)
        except BaseException:
            if deed is not None:
                journal.withdraw()
            raise
        # LMDB does not count a commit that changed nothing: the number stays.
        journal.committed(self._env.info()["last_txnid"])
