"""What the device fails to write or to read: the blocks concerned become misses.

Failed write-back: blocks are removed before anybody reads zeros in their place. A page that the
device refuses becomes clean again and is right in memory, until the kernel needs the memory. No
call of a client reports that, least of all with passthrough. syncfs(2) does, for all files of the
file system together (since Linux 5.8), so one error drops everything that was stored since the last
good look. A look costs little if the kernel has already written everything by itself. So a look
waits for such a moment, or for the kernel's log to report a failure (kernel_log.py).

Failed reads: with passthrough the kernel reads for the client, and this process does not learn of
an error. The kernel's log reports it, though not every error and not which block. So for some
seconds after such a line all blocks that were in use are read once, in a thread.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

import numpy as np

from kvfs.core.errors import Damaged, KvfsError, NoSpace
from kvfs.core.records import INODE_PREFIX, inode_key, parse_inodes
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.engine.blocks.publishing import Publishing
from kvfs.pool.departures import RecentlyRemoved
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.background import Aside
from kvfs.storage.extents import Extents
from kvfs.storage.heat import Heat
from kvfs.storage.inode_numbers import InodeNumbers

_log: Final = logging.getLogger(__name__)

#: The kernel writes back what is older than 30 s, and looks every 5 s (dirty_expire_centisecs and
#: dirty_writeback_centisecs). So long after the last store nothing is left for a look to write.
_QUIET_S: Final = 36.0
#: Longest time between looks, under a load that never rests; a look then flushes recent stores.
LOADED_S: Final = 120.0
#: Least time between looks that the log asks for, since one failure makes several lines.
_HINTED_S: Final = 0.5
#: Inodes in one step, some 5 us each; a step runs between two requests.
_STEP: Final = 128
#: The kernel drops lines after the tenth in five seconds (printk_ratelimited).
_SUSPECT_S: Final = 6.0
#: A block may have been used last this long before the line is read, at the next tick.
_BEFORE_S: Final = 1.0
#: Most inodes that a pass reads, so that it ends even on a failing device.
_INODES_MAX: Final = 4096
_PIECE_BYTES: Final = 1 << 20


class WriteBackResult(NamedTuple):
    """What a look found: the first error, and the sequence number at its beginning."""

    begun_at: int
    error: OSError | None
    #: Whether the error was the index's.
    of_index: bool = False


class WriteBack:
    """Decides when to look at one drive; all but the look itself runs on the pool's thread."""

    def __init__(self, pool: Pool, publishing: Publishing, drive: PoolDrive) -> None:
        self._pool = pool
        self._drive = drive
        self._pool_fd = pool.device.pool_fds[drive.number]
        self._drive_of: Final = pool.numbers.drive
        self._publishing = publishing
        self._look: Aside[WriteBackResult] = Aside("kvfs-look")
        self._looked_s = self._changed_s = pool.monotonic_s()
        self._hinted = False
        #: What is in memory only is never written back.
        self._in_memory = pool.device.fs_type == "tmpfs"
        #: All up to this sequence number is durable, or was dropped; the rest may not be.
        self._proven = self._seen = pool.counters.sequence
        #: Nor what was stored after this time and before this start: the kernel may be writing it.
        self._since_ns = pool.clock_ns() - int(_QUIET_S * SECOND_NS)
        #: The walk under way: it drops blocks up to this sequence number, and is behind this row.
        self._upto: int | None = None
        self._after = b""
        self._gone = 0
        self.looks = self.failures = 0
        #: Why the index cannot be trusted any more; empty while it can.
        self.index_error = ""

    @property
    def is_proven(self) -> bool:
        """Whether all that was stored and closed is durable, as far as is known."""
        return self._proven == self._pool.counters.sequence and self._upto is None

    def hint(self) -> None:
        """Note that the kernel's log reports a failed write of the device."""
        self._hinted = True

    def run_due(self, now_s: float) -> None:
        """Begin a look that is due, or act on one that has ended."""
        found = self._look.pop_result()
        if self._sync_failed():  # a client's fsync got the error, and the kernel reports it once
            found = WriteBackResult(self._pool.counters.sequence, OSError("fsync"))
        if found is not None:
            self._judge(found)
        elif self._upto is None and not self._look.busy and self._is_due(now_s):
            self._looked_s, self._hinted = now_s, False
            begun_at = self._pool.counters.sequence
            self.looks += 1
            self._look.start(lambda: self._look_now(begun_at))

    def settle(self) -> bool:
        """Look once more before a stop, and drop at once what the device may not have; it blocks.

        Return False if that failed: then the index cannot be trusted. The kernel reports an error
        only once, so one that was found and not acted on would be forgotten.
        """
        if self._in_memory:
            return True
        self._look.join()
        found = self._look.pop_result()
        if found is None or found.error is None:
            found = self._look_now(self._pool.counters.sequence)
        if self._sync_failed() and found.error is None:
            found = found._replace(error=OSError("fsync"))
        if found.error is not None:
            self._judge(found)
        try:
            while self._upto is not None:
                self._walk_on()
        except (NoSpace, OSError) as error:
            _log.error("blocks that the device may not have are still there: %s", error)
            return False
        return not self.index_error

    def close(self) -> None:
        """Wait for a look that is under way."""
        self._look.join()

    def _sync_failed(self) -> bool:
        """Whether another sync of the drive was told of an error since the last call."""
        failed = self._pool.durable.syncs.failed
        if self._drive.number not in failed:
            return False
        failed.discard(self._drive.number)
        return True

    def _is_due(self, now_s: float) -> bool:
        pool = self._pool
        if pool.counters.sequence != self._seen:
            self._seen, self._changed_s = pool.counters.sequence, now_s
        since_s = now_s - self._looked_s
        if self._in_memory:
            return False
        if self._hinted:
            return since_s >= _HINTED_S
        if self._seen == self._proven and not pool.open.inodes.written:
            return False
        if since_s >= _QUIET_S <= now_s - self._changed_s:
            return True
        return since_s >= LOADED_S

    def _look_now(self, begun_at: int) -> WriteBackResult:
        """Write back what is left and ask for errors, in the thread."""
        pool = self._pool
        try:
            if self._pool_fd == pool.device.home.pool_fd:
                pool.index.sync()
        except (KvfsError, OSError) as error:
            return WriteBackResult(begun_at, OSError(str(error)), of_index=True)
        try:
            pool.syscalls.syncfs(self._pool_fd)
        except OSError as error:
            return WriteBackResult(begun_at, error)
        return WriteBackResult(begun_at, None)

    def _judge(self, found: WriteBackResult) -> None:
        if found.error is None:
            self._proven, self._since_ns = found.begun_at, self._pool.clock_ns()
            return
        self.failures += 1
        if found.of_index:
            self.index_error = f"the index could not be written back: {found.error}"
            return
        _log.error(
            "the device failed to write: %s; blocks stored since the last good check are dropped",
            found.error,
        )
        for ino in list(self._pool.open.inodes.written):
            if self._is_here(ino):
                self._dismiss(ino)
        walking = self._upto is not None
        # Rows are in the order of inodes, and so drive by drive.
        self._upto, self._after = self._pool.counters.sequence, inode_key(self._drive.ino)
        if not walking:
            self._pool.background.submit_leisure(self._step)

    def _step(self) -> None:
        """Do one step of the walk at leisure. Raises NoSpace, OSError: the rest waits."""
        rows, suspects = self._next_suspects()
        leisure = self._pool.background.submit_leisure

        def drop(without: set[InodeNo]) -> None:
            self._drop(rows, suspects, without)
            if self._upto is not None:
                leisure(self._step)

        self._pool.background.of(self._drive.ino).device.submit(
            functools.partial(self._without_identity, suspects),
            lambda without: leisure(functools.partial(drop, without)),
        )

    def _walk_on(self) -> None:
        """Drop some of the blocks stored since the last good look. Raises NoSpace, OSError."""
        rows, suspects = self._next_suspects()
        self._drop(rows, suspects, self._without_identity(suspects))

    def _next_suspects(self) -> tuple[bytes, dict[InodeNo, InodeRecord]]:
        """Return the last key of the next rows, and the blocks there that may be lost."""
        rows = next(self._pool.index.walk(INODE_PREFIX, _STEP, after=self._after), [])
        found = list(parse_inodes(rows))
        suspects = {
            ino: record
            for ino, record in found
            if record is not None and self._is_here(ino) and self._is_suspect(record)
        }
        goes_on = bool(found) and self._is_here(found[-1][0])
        return rows[-1][0] if goes_on else b"", suspects

    def _is_here(self, ino: InodeNo) -> bool:
        return self._drive_of(ino) == self._drive.number

    def _without_identity(self, suspects: Collection[InodeNo]) -> set[InodeNo]:
        """Return those of *suspects* without an identity; in any thread. Raises OSError."""
        return {ino for ino in suspects if not self._has_identity(ino)}

    def _drop(
        self, after: bytes, suspects: Mapping[InodeNo, InodeRecord], without: set[InodeNo]
    ) -> None:
        """Drop the *suspects* that the device does not have: *without* an identity, or written.

        They were found in the rows up to *after*; empty: there are no more. Raises NoSpace,
        OSError.
        """
        pool = self._pool
        for ino, record in suspects.items():
            lacks = ino in pool.durable.not_durable or ino in pool.open.inodes.written
            if (ino in without or lacks) and pool.index.inode_or_miss(ino) == record:
                self._dismiss(ino)
        pool.departures.removed.give_way()  # they must not be opened any more
        if after:
            self._after = after
            return
        assert self._upto is not None
        _log.error("%d blocks dropped, which the device may not have", self._gone)
        self._proven, self._since_ns, self._gone = self._upto, self._pool.clock_ns(), 0
        self._upto = None

    def _is_suspect(self, record: InodeRecord) -> bool:
        assert self._upto is not None
        if record.sequence > self._upto:
            return False  # stored since then: the next look will show
        return record.sequence > self._proven or record.ctime_ns >= self._since_ns

    def _has_identity(self, ino: InodeNo) -> bool:
        """Whether the pass found the bytes of block *ino* on the device (engine/durability/)."""
        with contextlib.suppress(Damaged):
            return self._pool.extents.identity(ino) is not None
        return False

    def _dismiss(self, ino: InodeNo) -> None:
        self._gone += self._publishing.dismiss_lost(ino)


class Unreadable:
    """Suspects blocks of one drive, tries to read them, and drops those that cannot be read.

    They are misses then, not EIO.
    """

    def __init__(
        self,
        inodes: OpenInodes,
        heat: Heat,
        extents: Extents,
        removed: RecentlyRemoved,
        numbers: InodeNumbers,
        publishing: Publishing,
        drive: PoolDrive,
    ) -> None:
        self._inodes = inodes
        self._heat = heat
        self._extents = extents
        self._removed = removed
        self._numbers = numbers
        self._drive = drive.number
        self._drive_of: Final = numbers.drive
        self._publishing = publishing
        self._trial: Aside[list[InodeNo]] = Aside("kvfs-try-to-read")
        self._until_s = self._stamped_s = float("-inf")
        #: The heat's clock at two moments, the older at least ``_BEFORE_S`` ago.
        self._older = self._newer = heat.stamp
        #: Blocks open when the first line came, as their readers may go on for hours.
        self._open: list[InodeNo] = []
        self._ended = False

    def suspect(self, now_s: float) -> None:
        """Note that the kernel's log reports a failed read of the device."""
        if now_s >= self._until_s:
            read = [ino for ino, opened in self._inodes.items() if opened.readers]
            self._open = [ino for ino in read if self._drive_of(ino) == self._drive][:_INODES_MAX]
        self._until_s = now_s + _SUSPECT_S

    def run_due(self, now_s: float) -> None:
        """Drop what the last trial could not read, and try what was used since."""
        for ino in self._trial.pop_result() or ():
            opened = self._inodes.get(ino)
            if opened is not None and opened.writers:
                continue  # its writer may write it again
            if self._publishing.dismiss_lost(ino):
                _log.error("inode %#x dropped: the device cannot read it", ino)
                self._removed.give_way()  # it must not be opened any more
        if now_s < self._until_s:
            if not self._trial.busy:
                self._try_some()
        elif now_s - self._stamped_s >= _BEFORE_S:
            self._older, self._newer = self._newer, self._heat.stamp
            self._stamped_s = now_s

    def close(self) -> None:
        """Wait for a read that is under way."""
        self._ended = True
        self._trial.join()

    def _try_some(self) -> None:
        columns = self._heat.columns()
        here = self._numbers.drives(columns.ino) == self._drive
        used = np.flatnonzero((columns.touched >= self._older) & here)
        used = used[np.argsort(columns.touched[used])][-_INODES_MAX:]
        inos = [*self._open, *(InodeNo(ino) for ino in columns.ino[used].tolist() if ino)]
        self._open = []
        self._older = self._newer = self._heat.stamp
        if inos:
            self._trial.start(lambda: [ino for ino in inos if self._fails(ino)])

    def _fails(self, ino: InodeNo) -> bool:
        """Whether a byte of the extent of *ino* cannot be read; in the thread."""
        return not self._ended and not is_legible(self._extents, ino)


def is_legible(extents: Extents, ino: InodeNo) -> bool:
    """Whether the whole extent of *ino* can be read; one that is gone meanwhile counts as read."""
    piece = bytearray(_PIECE_BYTES)
    try:
        fd = extents.open(ino, os.O_RDONLY)
    except Damaged:
        return True
    except OSError:
        return False
    try:
        offset_bytes = 0
        while done_bytes := os.preadv(fd, [piece], offset_bytes):
            offset_bytes += done_bytes
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
