"""Commits of the index: one LMDB transaction each; the journal records which request it does."""

import errno
from typing import Final

import lmdb

from kvfs.core.errors import NoSpace
from kvfs.storage.index_map import STATE
from kvfs.storage.index_transaction import Deed, Rows
from kvfs.storage.journal import Journal
from kvfs.storage.lmdb_file import IndexFile, raise_index_error
from kvfs.storage.syscalls import Syscalls


class Commits:
    """Commits rows to one environment."""

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
