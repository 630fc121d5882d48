"""Moves blocks from memory to the drive of their inode, beside the requests.

The thread for long jobs copies a block that nobody writes. Then it leaves memory, if nobody used it
otherwise meanwhile: number, name, size, times and owner stay, and so do handles of NFS. Readers
whom this process serves go on with the copy. A block that the kernel has open (passthrough) stays
for a while, since most are closed soon; then it gets a successor (successors.py).
"""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Container
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import KvfsError
from kvfs.core.lifecycle import SETTLED
from kvfs.core.types import DriveNo, InodeNo, InodeRecord
from kvfs.engine.blocks.successors import Successors
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: What is moved in a second, at most: a few tenths of what an NVMe drive writes. Clients' loads and
#: stores have the rest.
_RATE_BYTES: Final = 256 << 20
#: What the kernel has open for longer since it was to move gets a successor. A load takes less.
_OPEN_S: Final = 5.0


class _Order(NamedTuple):
    """When a block was to move."""

    number: int
    since_s: float


class Moves:
    """The moves of one pool: on each drive one at a time, in the order in which they were asked."""

    def __init__(self, pool: Pool, outgrown: Container[InodeNo], successors: Successors) -> None:
        """*outgrown*: drafts that are being copied already."""
        self._pool = pool
        self._successors = successors
        self._outgrown = outgrown
        self._drive = pool.numbers.drive
        #: What waits, and what is being copied to each drive.
        self._due: dict[InodeNo, _Order] = {}
        self._copying: dict[DriveNo, tuple[InodeNo, _Order]] = {}
        self._ticket = 0
        #: What could not leave, until the next tick.
        self._later: dict[InodeNo, _Order] = {}
        #: Before that no copy begins, because of what was moved.
        self._rests_until_s = -math.inf
        self.moved = self.moved_bytes = 0
        #: Copies that were in vain, because the block was used meanwhile.
        self.undone = 0

    def __contains__(self, ino: InodeNo) -> bool:
        """Whether *ino* is to be moved, or is being moved."""
        copied = any(ino == copied for copied, _ in self._copying.values())
        return ino in self._due or ino in self._later or copied

    def __len__(self) -> int:
        return len(self._due) + len(self._later) + len(self._copying)

    def order(self, ino: InodeNo) -> None:
        """Move *ino*, which is in memory, as soon as nobody has it open, or after a while."""
        if ino not in self:
            self._ticket += 1
            self._due[ino] = _Order(self._ticket, self._pool.monotonic_s())

    @property
    def written_bytes(self) -> int:
        """What the moves have written to the drives."""
        return self.moved_bytes + self._successors.moved_bytes

    def order_whole(self) -> int:
        """Move all that is whole by now, because it is to be durable; return a ticket."""
        index, memory = self._pool.index, self._pool.extents.memory
        for ino in memory.inos() if memory is not None else ():
            record = index.inode_or_miss(ino)
            if record is not None and record.state in SETTLED:
                self.order(ino)
        return self._ticket

    def have_ended(self, ticket: int) -> bool:
        """Whether all that was ordered up to *ticket* has left memory, or is gone; move on."""
        if not len(self):
            return True
        self.run_due(math.inf)
        copied = (order for _, order in self._copying.values())
        return all(order.number > ticket for order in (*self._due.values(), *copied))

    def run_due(self, now_s: float) -> None:
        """Begin with what is due; a block that is open waits for a later tick."""
        self._due |= self._later
        self._later.clear()
        self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
        memory, drives = self._pool.extents.memory, len(self._pool.space.drives.all)
        for ino in list(self._due) if memory is not None and now_s >= self._rests_until_s else ():
            if len(self._copying) == drives:
                return
            if memory is None or ino not in memory:
                del self._due[ino]
            elif self._drive(ino) not in self._copying:
                self._begin(ino)

    def _begin(self, ino: InodeNo) -> None:
        record = self._pool.index.inode_or_miss(ino)
        if record is None:
            del self._due[ino]  # its extent goes
            return
        drive = self._pool.space.drives.of(ino)
        if drive.has_failed or not drive.probe.takes_blocks:
            return
        if self._is_quiet(ino, record):
            self._copying[self._drive(ino)] = (ino, self._due.pop(ino))
            self._pool.background.submit_long(functools.partial(self._copy, ino, record), ino)
        elif self._pool.monotonic_s() - self._due[ino].since_s >= _OPEN_S:
            self._begin_successor(ino, record)

    def _begin_successor(self, ino: InodeNo, record: InodeRecord) -> None:
        """Begin to give *ino* a successor, if it is only read and there is room; else later."""
        if not self._successors.may_have(self._pool.open.inodes.get(ino), record):
            return
        with contextlib.suppress(OSError):
            work = self._successors.begin(ino, record, unlocked=True)
            self._copying[self._drive(ino)] = (ino, self._due.pop(ino))

            def copy() -> None:
                followed = functools.partial(self._succeeded, ino, record, work())
                self._pool.background.hand_over(followed)

            self._pool.background.submit_long(copy, ino)

    def _succeeded(self, ino: InodeNo, record: InodeRecord, follow: Callable[[], None]) -> None:
        """Go on after a successor of *ino* was copied."""
        pool = self._pool
        _, order = self._copying.pop(self._drive(ino))
        now_s = pool.monotonic_s()
        self._rests_until_s = max(self._rests_until_s, now_s) + record.allocated_bytes / _RATE_BYTES
        try:
            follow()
        except (KvfsError, OSError) as error:
            _log.warning("inode %#x stays in memory: %s", ino, error)
        if pool.index.inode_or_miss(ino) is not None:
            self._later[ino] = order._replace(since_s=now_s)
        self._go_on(now_s)

    def _is_quiet(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Whether *ino* is closed, or all its bytes are read through this process."""
        if record.state not in SETTLED or ino in self._outgrown:
            return False
        opened = self._pool.open.inodes.get(ino)
        return opened is None or self._is_only_read(opened)

    def _is_only_read(self, opened: OpenInode) -> bool:
        """Whether nobody writes *opened*, and the kernel has nothing of it."""
        kept = opened.quiet_writers or opened.stands_in or opened.kept_open or opened.settling
        busy = opened.writers or opened.allocating or opened.gone is not None or kept
        return not (busy or self._pool.kernel.writers_run_free or self._is_held_elsewhere(opened))

    def _is_held_elsewhere(self, opened: OpenInode) -> bool:
        """Whether a client of a dead mount may have the extent, by a passthrough of that time."""
        extents = self._pool.extents
        return extents.serial(opened.ino) < extents.held_below

    def _copy(self, ino: InodeNo, record: InodeRecord) -> None:
        """Copy *ino*, in the thread; then the loop goes on."""
        pool, held_bytes, copy_fd = self._pool, -1, -1
        try:
            fd = pool.extents.open(ino, os.O_RDONLY)
            try:
                # The server's own descriptor, for readers, could write.
                is_open = ino in pool.open.inodes
                if is_open or not pool.extents.may_be_written(fd):
                    held_bytes = pool.extents.moves.copy(ino, fd)
                    copy_fd = pool.extents.moves.open(ino) if is_open else -1
            finally:
                pool.syscalls.close(fd)
        except (KvfsError, OSError) as error:
            _log.warning("inode %#x stays in memory: %s", ino, error)
        followed = functools.partial(self._copied, ino, record, held_bytes, copy_fd)
        pool.background.hand_over(followed)

    def _copied(self, ino: InodeNo, record: InodeRecord, held_bytes: int, copy_fd: int) -> None:
        """Let *ino* leave memory; *held_bytes*: what its copy takes, -1 if there is none.

        *copy_fd* is for readers, -1 if there were none. Atomic: from the last look at who uses it
        until it has left. Raises NoSpace, OSError.
        """
        pool = self._pool
        _, order = self._copying.pop(self._drive(ino))
        now_s = pool.monotonic_s()
        self._rests_until_s = max(self._rests_until_s, now_s) + max(0, held_bytes) / _RATE_BYTES
        opened = pool.open.inodes.get(ino)
        is_read = opened is not None and opened.fd >= 0
        lacks = held_bytes < 0 or (is_read and copy_fd < 0)
        left = ""
        try:
            if lacks or not self._may_leave(ino, record):
                self._undo(ino, order)
            else:
                left = self._leave(ino)
                if opened is not None:
                    opened.hold(held_bytes)
                if opened is not None and is_read:
                    opened.exchange_extent(copy_fd)
                    copy_fd = -1
        finally:
            if copy_fd >= 0:
                pool.syscalls.close(copy_fd)
        if left:
            self._tell(ino, record, held_bytes, left)
        self._go_on(now_s)

    def _may_leave(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Whether the copy of *ino* is what it was and is, and nobody can change its bytes."""
        pool = self._pool
        memory = pool.extents.memory
        if memory is None or ino not in memory or pool.index.inode_or_miss(ino) != record:
            return False
        if not self._is_quiet(ino, record):
            return False
        return ino in pool.open.inodes or not pool.extents.is_written(ino)

    def _leave(self, ino: InodeNo) -> str:
        """From now on the copy of *ino* counts; return what is to be removed. Raises OSError."""
        pool, memory = self._pool, self._pool.extents.memory
        assert memory is not None, "it is there"
        pool.kernel.unnamed(ino)  # descriptors and ids that are kept for the next open
        pool.at_hand.forget(ino)
        return memory.leave(ino)

    def _tell(self, ino: InodeNo, record: InodeRecord, held_bytes: int, left: str) -> None:
        """Tell all that follow the index that *ino* has moved, and remove what it *left*."""
        pool, memory = self._pool, self._pool.extents.memory
        assert memory is not None, "it was there"
        pool.background.submit_long(functools.partial(memory.remove, left), ino)
        self.moved += 1
        self.moved_bytes += held_bytes
        growth_bytes = held_bytes - record.allocated_bytes
        used_bytes = pool.counters.used_bytes + growth_bytes
        moved = record._replace(allocated_bytes=held_bytes)
        try:
            with pool.change(pool.counters._replace(used_bytes=used_bytes)) as change:
                theirs = dict.fromkeys(pool.index.xattrs(ino), b"")
                change.write(Changed(ino, record, moved, Why.MOVED, theirs, theirs))
        except BaseException:
            pool.durable.not_durable.note_gap()  # nobody was told of it: a search finds it
            raise
        if growth_bytes:
            pool.kernel.attributes_corrected(ino)

    def _undo(self, ino: InodeNo, order: _Order) -> None:
        """Remove the copy of *ino*, and try again if it is there still."""
        pool = self._pool
        self.undone += 1
        pool.background.submit_long(functools.partial(pool.extents.moves.undo, ino), ino)
        if pool.extents.memory is not None and ino in pool.extents.memory:
            self._later[ino] = order
