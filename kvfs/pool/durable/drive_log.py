"""The log of the index on one drive: the batches that wait for it, and its copies.

Batches are the pool's (index_log.py); each drive that has a log writes all of them, in a thread of
its own, so that one that does not answer keeps nobody waiting. A log that lacks one has a gap, and
goes on from a new copy of the index.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.errors import KvfsError
from kvfs.core.log_records import Batch, Moment, pack_batch
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.background import Aside
from kvfs.storage.row_log import (
    HeldIndex,
    LogFile,
    found_copies,
    log_bytes,
    open_log,
    remove_log_files,
    write_copy,
)
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: The log of a small index may be longer than its copy: a copy costs two flushes, too.
_LOG_LEAST_BYTES: Final = 4 << 20
#: After a copy or a batch that failed the next copy is tried so much later (s).
_TRY_AGAIN_S: Final = 10.0


class _Written(NamedTuple):
    """How batches or a copy ended, and how long they are."""

    size_bytes: int = 0
    error: Exception | None = None


class WaitingBatch:
    """A batch that is to be written, perhaps to several drives; its bytes are made once."""

    def __init__(self, batch: Batch, size_bytes: int) -> None:
        """*size_bytes*: about how long it is."""
        self.batch: Final = batch
        self.size_bytes: Final = size_bytes
        self._lock = threading.Lock()
        self._raw = b""

    def raw(self) -> bytes:
        """Return its bytes; in the thread that needs them first they are made."""
        with self._lock:
            self._raw = self._raw or pack_batch(*self.batch)
            return self._raw


class DriveLog:
    """One drive's log. Everything but its threads' work runs on the loop's thread."""

    def __init__(
        self, drive: PoolDrive, pool_fd: int, syscalls: Syscalls, waiting_most_bytes: int
    ) -> None:
        """*pool_fd* is the directory of *drive*. If more bytes wait for it, they are dropped."""
        self.drive: Final = drive
        self._pool_fd = pool_fd
        self._syscalls = syscalls
        self._most_bytes = waiting_most_bytes
        self._log_fd: int | None = None
        self._waiting: deque[WaitingBatch] = deque()
        self._file: LogFile | None = None
        #: Whether the next batch begins a new file.
        self._begins = True
        self._writing: Aside[_Written] = Aside("kvfs-log")
        self._copying: Aside[_Written] = Aside("kvfs-copies")
        self._held: HeldIndex | None = None
        #: Whether a copy and all batches behind it lead to the last batch.
        self.is_whole = False
        #: Whether there is a gap behind the copy that is being written.
        self._gap = False
        self._tried_s = float("-inf")
        #: What was logged since the last copy; how much of it was before the one being written.
        self.size_bytes = self._before_copy_bytes = 0
        self._copy_bytes = 0
        self.copies = self.failures = 0

    def go_on(self, last_number: int) -> None:
        """Go on behind batch *last_number*, if a copy leads there; makes the log's directory.

        Raises OSError.
        """
        log_fd = self._open()
        copies = sorted(found_copies(log_fd, self._syscalls))
        self.is_whole = any(copy.moment.number <= last_number for copy in copies)
        if self.is_whole:
            self._copy_bytes = copies[-1].size_bytes
            self.size_bytes = log_bytes(log_fd, self._syscalls)

    def _open(self) -> int:
        """Return the log's directory, which is made if it is missing. Raises OSError."""
        if self._log_fd is None:
            self._log_fd = open_log(self._pool_fd, self._syscalls, create=True)
        assert self._log_fd is not None
        return self._log_fd

    @property
    def takes_batches(self) -> bool:
        """Whether what is committed now belongs into this log; else its next copy has it."""
        return self.is_whole or self._copying.busy

    @property
    def is_at_rest(self) -> bool:
        """Whether it has written all batches that it was given."""
        return not (self._writing.busy or self._waiting)

    @property
    def is_used(self) -> bool:
        """Whether a thread is at work on the drive."""
        return self._writing.busy or self._copying.busy

    # ---- batches ----

    def add(self, batch: WaitingBatch) -> None:
        """Write *batch* next, if it is one for this log."""
        if not self.takes_batches:
            return
        self._waiting.append(batch)
        if sum(each.size_bytes for each in self._waiting) > self._most_bytes:
            self.break_off("more rows than are kept wait for the device")

    def run_due(self) -> None:
        """Note how what is complete has ended, and begin to write what waits."""
        written = self._writing.pop_result()
        if written is not None:
            self._note_batches(written)
        copied = self._copying.pop_result()
        if copied is not None:
            self._note_copy(copied)
        if self._waiting and not self._writing.busy and self._log_fd is not None:
            self._writing.start(self._next_batches())

    def _next_batches(self) -> Callable[[], _Written]:
        """Return what writes all batches that wait."""
        batches, begins = tuple(self._waiting), self._begins
        self._waiting.clear()
        self._begins = False
        return lambda: self._write_batches(batches, begins=begins)

    def _write_batches(self, batches: tuple[WaitingBatch, ...], *, begins: bool) -> _Written:
        """Write *batches*; runs in the thread, or at the stop."""
        size_bytes = 0
        try:
            if begins:
                if self._file is not None:
                    self._file.close()
                    self._file = None
                first = batches[0].batch.moment.number
                self._file = LogFile(self._open(), self._syscalls, first)
            assert self._file is not None
            for each in batches:
                raw = each.raw()
                self._file.append(raw)
                size_bytes += len(raw)
        except OSError as error:
            return _Written(size_bytes, error)
        return _Written(size_bytes)

    def _note_batches(self, written: _Written) -> None:
        self.size_bytes += written.size_bytes
        if written.error is not None:
            self.break_off(written.error)

    def break_off(self, why: object) -> None:
        """Note that rows are lost for this log: what it says up to here is of an earlier state."""
        self.failures += 1
        _log.warning("index: its log%s has a gap: %s", self._where, why)
        self.is_whole, self._gap, self._begins = False, True, True
        self._waiting.clear()

    @property
    def _where(self) -> str:
        return f" on drive {self.drive.number}" if self.drive.number else ""

    # ---- copies ----

    def copy_due(self, now_s: float) -> bool:
        """Whether a copy of the index should be written now."""
        if self._copying.busy or now_s - self._tried_s < _TRY_AGAIN_S:
            return False
        if self._waiting:  # else the file that they begin would go with those before the copy
            return False
        return not self.is_whole or self.size_bytes >= max(_LOG_LEAST_BYTES, self._copy_bytes)

    def begin_copy(self, held: HeldIndex, moment: Moment, now_s: float) -> None:
        """Write what is *held* of the index, as it was at *moment*, in the thread."""
        self._tried_s = now_s
        self._copying.start(self._next_copy(held, moment, paced=True))

    def _next_copy(self, held: HeldIndex, moment: Moment, *, paced: bool) -> Callable[[], _Written]:
        """Return what writes a copy. Rows that wait are in it, and in their batch again."""
        self._held, self._gap, self._begins = held, False, True
        self._before_copy_bytes = self.size_bytes
        return lambda: self._write_copy(held, moment, paced=paced)

    def _write_copy(self, held: HeldIndex, moment: Moment, *, paced: bool) -> _Written:
        """Write one copy; runs in the thread, or at the stop."""
        try:
            log_fd = self._open()
            size_bytes = write_copy(log_fd, self._syscalls, held, moment, paced=paced)
            remove_log_files(log_fd, self._syscalls, moment.number)
        except (KvfsError, OSError) as error:
            return _Written(error=error)
        return _Written(size_bytes)

    def _note_copy(self, copied: _Written) -> None:
        self._end_hold()
        if copied.error is not None:
            self.failures += 1
            _log.warning("no copy of the index%s: %s", self._where, copied.error)
            return
        self.copies += 1
        self._copy_bytes = copied.size_bytes
        self.size_bytes -= self._before_copy_bytes
        self.is_whole = not self._gap

    def _end_hold(self) -> None:
        if self._held is not None:
            self._held.end()
            self._held = None

    # ---- the end ----

    def dismiss(self) -> None:
        """Write nothing that has not begun: another drive has the log."""
        self.is_whole, self._gap = False, True
        self._waiting.clear()

    def write_all(self) -> None:
        """Write the batches that wait, and wait for the device."""
        self.join()
        if self._waiting:
            self._note_batches(self._next_batches()())

    def copy_now(self, held: HeldIndex, moment: Moment) -> None:
        """Write a copy, and wait for the device."""
        self._note_copy(self._next_copy(held, moment, paced=False)())

    def join(self) -> None:
        """Wait for what the threads are at, and note how it ended."""
        self._writing.join()
        self._copying.join()
        for result, note in (
            (self._writing.pop_result(), self._note_batches),
            (self._copying.pop_result(), self._note_copy),
        ):
            if result is not None:
                note(result)

    def end(self) -> None:
        """Write nothing any more; what was logged stays. Idempotent."""
        self.join()
        self._waiting.clear()
        self._end_hold()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._log_fd is not None:
            self._syscalls.close(self._log_fd)
            self._log_fd = None
