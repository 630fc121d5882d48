"""Keeps the log of the index while the pool is in use, so that a power loss costs no rebuild.

Rows that were committed go to the log about once a second, in one batch. A copy of the whole index
is written when the log has become as long as the last copy, and if the log does not go on from one:
after a kill, when the rows of the last second are lost. All of it is written in threads, from what
the loop hands over; a device that does not answer keeps nobody else waiting.

In a pool of several drives two of them have the log, each whole (drive_log.py). What one has is
durable; the other catches up. A drive that fails, or does not answer, is replaced by another.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Final

from kvfs.core.log_records import Batch, Moment
from kvfs.core.settings import Settings
from kvfs.core.types import DriveNo, InodeNo
from kvfs.pool.durable.drive_log import DriveLog, WaitingBatch
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.ready_by_drive import ReadyByDrive
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.index import Index
from kvfs.storage.index_place import IndexAt
from kvfs.storage.index_transaction import UnloggedRows
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.row_log import forget_log, highest_number, leads_to
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: A batch is written earlier if so much waits.
_BATCH_BYTES: Final = 4 << 20
#: With more rows waiting than this, because the device does not answer, all are dropped.
UNLOGGED_MOST_BYTES: Final = 64 << 20
#: How far the numbers of two servers are apart: what the former one logged last is not asked.
_SERVERS_APART: Final = 1 << 32
#: So many drives of a pool have the log.
_DRIVES_LOGGED: Final = 2
#: After one drive has got the log in place of another, none is replaced for so long (s).
_STAYS_S: Final = 10.0


class IndexLog:
    """The batches, which drives write them, and what is due next."""

    def __init__(
        self,
        drives: Sequence[PoolDrive],
        pool_fds: Sequence[int],
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
        outdated: Collection[DriveNo] = (),
    ) -> None:
        """*unlogged* is told by *index*, which is *index_at*. Raises OSError.

        *pool_fds* are the directories of *drives*; what those *outdated* have logged goes. They
        were away, and other batches have those numbers now. *unfinished* is the pool's set of
        drafts and rewritten blocks.
        """
        self._drives = drives
        self._pool_fds = pool_fds
        self._index_at = index_at
        self._index = index
        self._unlogged = unlogged
        self._numbers = numbers
        self._ready = ready
        self._open_inodes = open_inodes
        self._unfinished = unfinished
        self._syscalls = syscalls
        self._interval_s = settings.index_log_s
        self._writes = not settings.read_only
        #: The drives that have the log, and those that had it and whose threads have not ended.
        self._logs: list[DriveLog] = []
        self._leaving: list[DriveLog] = []
        self._number = 0
        #: Whether a batch or a copy may have this number.
        self._is_used = True
        self._logged_s = self._replaced_s = float("-inf")
        #: What logs had copied, and where they had failed, that drives do not have any more.
        self._copies_left = self._failures_left = 0
        if self._writes:
            try:
                forget_log((pool_fds[drive] for drive in outdated), syscalls)
                self._go_on(index_at.logged, outdated)
            except BaseException:  # an interrupt, too: nobody else knows the descriptors
                self.end()
                raise

    def _go_on(self, last_number: int, outdated: Collection[DriveNo]) -> None:
        """Choose the drives: first those whose log leads to *last_number*. Raises OSError.

        If there is one drive the index was made from its log, which is not read once more.
        """
        leads = {
            drive: not self._drives[1:]
            or (
                drive.number not in outdated
                and leads_to(self._pool_fds[drive.number], last_number, self._syscalls)
            )
            for drive in (self._drives if last_number > 0 else ())
        }
        able = [drive for drive in self._drives if not drive.has_failed]
        by_lead = sorted(able, key=lambda drive: not leads.get(drive))
        for drive in by_lead[:_DRIVES_LOGGED]:
            log = self._new_log(drive)
            self._logs.append(log)
            log.go_on(last_number if leads.get(drive) else 0)
        self._number = last_number
        if not any(log.is_whole for log in self._logs):
            highest = [highest_number(pool_fd, self._syscalls) for pool_fd in self._pool_fds]
            self._number = max((last_number, *highest)) + _SERVERS_APART

    def _new_log(self, drive: PoolDrive) -> DriveLog:
        pool_fd = self._pool_fds[drive.number]
        return DriveLog(drive, pool_fd, self._syscalls, UNLOGGED_MOST_BYTES)

    def begin(self) -> None:
        """Remove what earlier servers logged, if this one logs nothing. Raises OSError.

        Call it when RUN says that the pool is in use.
        """
        if self._writes and self._interval_s <= 0:
            for log in self._logs:
                log.is_whole = False
            forget_log(self._pool_fds, self._syscalls)

    def run_due(self, now_s: float) -> None:
        """Begin a batch or a copy that is due, or note how one ended. Raises NoSpace, OSError."""
        if not self._writes or self._interval_s <= 0:
            self._unlogged.drop()
            return
        for log in self._logs:
            log.run_due()
        if self._drives[1:]:
            self._replace(now_s)
        if self._unlogged.overflowed:
            self._unlogged.overflowed = False
            self._break("more rows than are kept wait for the device")
        if self._batch_due(now_s):
            self._logged_s = now_s
            self._begin_batch()
        for log in self._logs:
            log.run_due()
            if log.copy_due(now_s) and self._may_copy(log):
                self._begin_copy(log, now_s)

    def _batch_due(self, now_s: float) -> bool:
        takers = [log for log in self._logs if log.takes_batches]
        if not takers:
            self._drop_rows()  # the copy that is due next has them
            return False
        if not self._unlogged or not any(log.is_at_rest for log in takers):
            return False
        return (
            now_s - self._logged_s >= self._interval_s or self._unlogged.size_bytes >= _BATCH_BYTES
        )

    def _may_copy(self, log: DriveLog) -> bool:
        """Whether *log*'s drive answers; if no other log is whole, it is tried all the same."""
        others = [other for other in self._logs if other.is_whole and other is not log]
        return not others or not log.drive.probe.is_slow

    def _moment(self) -> Moment:
        written = {
            ino
            for ino, opened in self._open_inodes.items()
            if opened.writers and opened.gone is None
        }
        pending = self._unfinished | self._ready.numbers() | written
        return Moment(self._number, self._numbers.next, tuple(sorted(pending)))

    def _begin_batch(self) -> None:
        """Have all that waits written, as the next batch. Raises NoSpace, OSError."""
        # Atomic: rows and moment are of the same state of the index.
        self._index.settle()
        self._number += 1
        self._is_used = True
        size_bytes = self._unlogged.size_bytes
        batch = WaitingBatch(Batch(self._moment(), self._unlogged.pop()), size_bytes)
        for log in self._logs:
            log.add(batch)

    def _begin_copy(self, log: DriveLog, now_s: float) -> None:
        """Have the index as it is now written to *log*'s drive. Raises NoSpace, Damaged, OSError.

        Rows that are not in the log yet are in the copy, and in the next batch again.
        """
        # Atomic: the copy and the moment are of the same state of the index.
        held, self._is_used = self._index.hold(), True
        log.begin_copy(held, self._moment(), now_s)

    def _break(self, why: object) -> None:
        """Note that rows are lost for every log."""
        for log in self._logs:
            log.break_off(why)
        self._drop_rows()

    def _drop_rows(self) -> None:
        """Forget the rows that wait: no log has them."""
        self._unlogged.drop()
        if self._is_used:
            self._is_used = False
            self._number += 1  # no batch has this number, so what follows is not read

    # ---- which drives ----

    def _replace(self, now_s: float) -> None:
        """Let another drive have the log in place of one that fails, or does not answer."""
        for left in [log for log in self._leaving if not log.is_used]:
            self._leaving.remove(left)
            self._copies_left += left.copies
            self._failures_left += left.failures
            left.end()
        for log in [log for log in self._logs if log.drive.has_failed]:
            self._leave(log)
        slow = [log for log in self._logs if log.drive.probe.is_slow]
        lacks = len(self._logs) < _DRIVES_LOGGED
        if not (slow or lacks) or (not lacks and now_s - self._replaced_s < _STAYS_S):
            return
        known = {log.drive for log in (*self._logs, *self._leaving)}
        others = [drive for drive in self._drives if drive not in known]
        able = [drive for drive in others if drive.probe.takes_blocks]
        if not able:
            return
        self._replaced_s = now_s
        if slow and not lacks:
            self._leave(slow[0])
        best = min(able, key=lambda drive: drive.probe.took_s)
        _log.warning("drive %d gets a copy of the index, and its log", best.number)
        self._logs.append(self._new_log(best))

    def _leave(self, log: DriveLog) -> None:
        self._logs.remove(log)
        self._leaving.append(log)
        log.dismiss()

    # ---- the end ----

    def complete(self) -> int:
        """Log all that is not logged yet, and wait for the devices.

        Return the number of the batch or copy that leads to the index as it is; 0 if none does, or
        if none is wanted. Raises NoSpace, Damaged, OSError.
        """
        if not self._writes:
            return 0
        logs = [log for log in self._logs if not log.drive.has_failed]
        for log in logs:
            log.join()
            if self._interval_s <= 0:
                log.is_whole = False
        if self._interval_s <= 0 and not self._index_at.in_memory:
            return 0
        self._index.settle()
        if self._unlogged and any(log.is_whole for log in logs):
            self._begin_batch()
        for log in logs:
            log.write_all()
            if not log.is_whole:
                self._is_used = True
                log.copy_now(self._index.hold(), self._moment())
        return self._number if any(log.is_whole for log in logs) else 0

    def end(self) -> None:
        """Write nothing any more; what was logged stays. Idempotent."""
        for log in (*self._logs, *self._leaving):
            log.end()
        self._writes = False

    def is_only_on(self, drive: PoolDrive) -> bool:
        """Whether *drive* has all of the log, and no other one has."""
        return [log.drive for log in self._logs if log.is_whole] == [drive]

    def describe(self, now_s: float) -> dict[str, object]:
        """Return what `kvfs status` shows: where the index is, and its log. Raises OSError.

        ``behind_s``: for how long the log lacks what was committed; None: a start after a power
        loss would rebuild the index, or go back to an earlier copy.
        """
        whole = [log for log in self._logs if log.is_whole]
        behind_s: float | None = None
        if whole:
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
                "bytes": max((log.size_bytes for log in self._logs), default=0),
                "copies": self.copies,
                "failures": self._failures_left + sum(log.failures for log in self._logs),
                "drives": [log.drive.number for log in whole],
            },
        }

    @property
    def copies(self) -> int:
        """How many copies of the index were written."""
        return self._copies_left + sum(log.copies for log in self._logs)
