"""Keeps the log of the index while the pool is in use, so that a power loss costs no rebuild.

Rows that were committed go to the log about once a second, in one batch. A copy of the whole index
is written when the log has become as long as the last copy, and if the log does not go on from one:
after a kill, when the rows of the last second are lost. All of it is written in threads, from what
the loop hands over; a device that does not answer keeps nobody else waiting.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.errors import KvfsError
from kvfs.core.log_records import Moment, pack_batch
from kvfs.core.settings import Settings
from kvfs.core.types import InodeNo
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.ready_by_drive import ReadyByDrive
from kvfs.storage.background import Aside
from kvfs.storage.index import Index
from kvfs.storage.index_place import IndexAt
from kvfs.storage.index_transaction import Rows, UnloggedRows
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.row_log import (
    HeldIndex,
    LogFile,
    forget_log,
    found_copies,
    log_bytes,
    log_files,
    open_log,
    remove_log_files,
    write_copy,
)
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: A batch is written earlier if so much waits.
_BATCH_BYTES: Final = 4 << 20
#: The log of a small index may be longer than its copy: a copy costs two flushes, too.
_LOG_LEAST_BYTES: Final = 4 << 20
#: After a copy or a batch that failed the next copy is tried so much later (s).
_TRY_AGAIN_S: Final = 10.0
#: With more rows waiting than this, because the device does not answer, all are dropped.
UNLOGGED_MOST_BYTES: Final = 64 << 20
#: How far the numbers of two servers are apart: what the former one logged last is not asked.
_SERVERS_APART: Final = 1 << 32


class _Written(NamedTuple):
    """How a batch or a copy ended, and how long it is."""

    size_bytes: int = 0
    error: Exception | None = None


class IndexLog:
    """The batch and the copy that are being written, and what is due next."""

    def __init__(
        self,
        pool_fd: int,
        index: Index,
        unlogged: UnloggedRows,
        numbers: InodeNumbers,
        ready: ReadyByDrive,
        open_inodes: OpenInodes,
        unfinished: set[InodeNo],
        settings: Settings,
        syscalls: Syscalls,
        *,
        index_at: IndexAt,
    ) -> None:
        """*unlogged* is told by *index*, which is *index_at*. Raises OSError.

        *unfinished* is the pool's set of drafts and rewritten blocks.
        """
        self._pool_fd = pool_fd
        self._index_at = index_at
        self._index = index
        self._unlogged = unlogged
        self._numbers = numbers
        self._ready = ready
        self._open_inodes = open_inodes
        self._unfinished = unfinished
        self._syscalls = syscalls
        self._interval_s = settings.index_log_s
        self._file: LogFile | None = None
        #: Whether the next batch begins a new file.
        self._begins = True
        self._writing: Aside[_Written] = Aside("kvfs-log")
        self._copying: Aside[_Written] = Aside("kvfs-copies")
        self._held: HeldIndex | None = None
        self._number = 0
        #: Whether a copy and all batches behind it lead to the last batch.
        self._whole = False
        #: Whether the log has a gap behind the copy that is being written.
        self._gap = False
        self._logged_s = self._tried_s = float("-inf")
        #: What was logged since the last copy; how much of it was before the one being written.
        self._log_bytes = self._before_copy_bytes = 0
        self._copy_bytes = 0
        self.copies = self.failures = 0
        self._log_fd: int | None = None
        if not settings.read_only:
            self._log_fd = open_log(pool_fd, syscalls, create=True)
            try:
                self._go_on(index_at.logged)
            except BaseException:  # an interrupt, too: nobody else knows the descriptor
                self.end()
                raise

    def _go_on(self, last_number: int) -> None:
        assert self._log_fd is not None
        copies = sorted(found_copies(self._log_fd, self._syscalls))
        numbers = [copy.moment.number for copy in copies]
        self._whole = last_number > 0 and any(number <= last_number for number in numbers)
        if self._whole:
            self._number = last_number
            self._copy_bytes = copies[-1].size_bytes
            self._log_bytes = log_bytes(self._log_fd, self._syscalls)
        else:
            files = log_files(self._log_fd, self._syscalls)
            self._number = max((last_number, *numbers, *files)) + _SERVERS_APART

    def begin(self) -> None:
        """Remove what earlier servers logged, if this one logs nothing. Raises OSError.

        Call it when RUN says that the pool is in use.
        """
        if self._log_fd is not None and self._interval_s <= 0:
            self._whole = False
            forget_log(self._pool_fd, self._syscalls)

    def run_due(self, now_s: float) -> None:
        """Begin a batch or a copy that is due, or note how one ended. Raises NoSpace, OSError."""
        self._finish()
        if self._log_fd is None or self._interval_s <= 0:
            self._unlogged.drop()
            return
        if self._unlogged.overflowed:
            self._unlogged.overflowed = False
            self._break("more rows than are kept wait for the device")
        if not self._writing.busy and self._batch_due(now_s):
            self._logged_s = now_s
            self._writing.start(self._next_batch())
        if not self._copying.busy and self._copy_due(now_s):
            self._tried_s = now_s
            self._copying.start(self._next_copy(paced=True))

    def _batch_due(self, now_s: float) -> bool:
        if not self._whole and not self._copying.busy:
            self._unlogged.drop()  # the copy that is due next has them
            return False
        if not self._unlogged:
            return False
        return (
            now_s - self._logged_s >= self._interval_s or self._unlogged.size_bytes >= _BATCH_BYTES
        )

    def _copy_due(self, now_s: float) -> bool:
        if now_s - self._tried_s < _TRY_AGAIN_S:
            return False
        return not self._whole or self._log_bytes >= max(_LOG_LEAST_BYTES, self._copy_bytes)

    def _moment(self) -> Moment:
        written = {
            ino
            for ino, opened in self._open_inodes.items()
            if opened.writers and opened.gone is None
        }
        pending = self._unfinished | self._ready.numbers() | written
        return Moment(self._number, self._numbers.next, tuple(sorted(pending)))

    # ---- batches ----

    def _next_batch(self) -> Callable[[], _Written]:
        """Return what writes the next batch, of all that waits. Raises NoSpace, OSError."""
        # Atomic: rows and moment are of the same state of the index.
        self._index.settle()
        self._number += 1
        moment, rows = self._moment(), self._unlogged.pop()
        begins, self._begins = self._begins, False
        return lambda: self._write_batch(moment, rows, begins=begins)

    def _write_batch(self, moment: Moment, rows: Rows, *, begins: bool) -> _Written:
        """Write one batch; runs in the thread, or at the stop."""
        assert self._log_fd is not None
        try:
            raw = pack_batch(moment, rows)
            if begins:
                if self._file is not None:
                    self._file.close()
                    self._file = None
                self._file = LogFile(self._log_fd, self._syscalls, moment.number)
            assert self._file is not None
            self._file.append(raw)
        except OSError as error:
            return _Written(error=error)
        return _Written(len(raw))

    def _break(self, why: object) -> None:
        """Note that rows are lost for the log: what it says up to here is of an earlier state."""
        self.failures += 1
        _log.warning("index: its log has a gap: %s", why)
        self._whole, self._gap, self._begins = False, True, True
        self._number += 1  # no batch has this number, so what follows is not read
        self._unlogged.drop()

    # ---- copies ----

    def _next_copy(self, *, paced: bool) -> Callable[[], _Written]:
        """Return what writes a copy of the index as it is now. Raises NoSpace, Damaged, OSError."""
        # Atomic: the copy and the moment are of the same state of the index. Rows that are not in
        # the log yet are in the copy, and in the next batch again.
        held = self._index.hold()
        moment = self._moment()
        self._held, self._gap, self._begins = held, False, True
        self._before_copy_bytes = self._log_bytes
        return lambda: self._write_copy(held, moment, paced=paced)

    def _write_copy(self, held: HeldIndex, moment: Moment, *, paced: bool) -> _Written:
        """Write one copy; runs in the thread, or at the stop."""
        assert self._log_fd is not None
        try:
            size_bytes = write_copy(self._log_fd, self._syscalls, held, moment, paced=paced)
            remove_log_files(self._log_fd, self._syscalls, moment.number)
        except (KvfsError, OSError) as error:
            return _Written(error=error)
        return _Written(size_bytes)

    def _finish(self) -> None:
        """Note how what is complete has ended."""
        written = self._writing.pop_result()
        if written is not None:
            self._note_batch(written)
        copied = self._copying.pop_result()
        if copied is not None:
            self._note_copy(copied)

    def _note_batch(self, written: _Written) -> None:
        self._log_bytes += written.size_bytes
        if written.error is not None:
            self._break(written.error)

    def _note_copy(self, copied: _Written) -> None:
        self._end_hold()
        if copied.error is not None:
            self.failures += 1
            _log.warning("no copy of the index: %s", copied.error)
            return
        self.copies += 1
        self._copy_bytes = copied.size_bytes
        self._log_bytes -= self._before_copy_bytes
        self._whole = not self._gap

    def _end_hold(self) -> None:
        if self._held is not None:
            self._held.end()
            self._held = None

    # ---- the end ----

    def complete(self) -> int:
        """Log all that is not logged yet, and wait for the device.

        Return the number of the batch or copy that leads to the index as it is; 0 if none does, or
        if none is wanted. Raises NoSpace, Damaged, OSError.
        """
        self._join()
        if self._log_fd is None:
            return 0
        if self._interval_s <= 0:
            self._whole = False
            if not self._index_at.in_memory:
                return 0
        self._index.settle()
        if self._whole and self._unlogged:
            self._note_batch(self._next_batch()())
        if not self._whole:
            self._note_copy(self._next_copy(paced=False)())
        return self._number if self._whole else 0

    def end(self) -> None:
        """Write nothing any more; what was logged stays. Idempotent."""
        self._join()
        self._end_hold()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._log_fd is not None:
            self._syscalls.close(self._log_fd)
            self._log_fd = None

    def _join(self) -> None:
        self._writing.join()
        self._copying.join()
        self._finish()

    def describe(self, now_s: float) -> dict[str, object]:
        """Return what `kvfs status` shows: where the index is, and its log. Raises OSError.

        ``behind_s``: for how long the log lacks what was committed; None: a start after a power
        loss would rebuild the index, or go back to an earlier copy.
        """
        behind_s: float | None = None
        if self._whole:
            behind_s = round(max(0.0, now_s - self._logged_s), 1) if self._unlogged else 0.0
        taken_bytes, free_bytes = self._index_at.memory_bytes() or (None, None)
        return {
            "index_in": self._index_at.in_memory or "pool",
            "index_memory": {
                "bytes": taken_bytes,
                "free_bytes": free_bytes,
                "full": self._index.room.is_bound,
            },
            "index_log": {
                "behind_s": behind_s,
                "bytes": self._log_bytes,
                "copies": self.copies,
                "failures": self.failures,
            },
        }
