"""Blocks: files with bytes, from their creation through their handles to their publishing.

While an inode has a writer its extent is the truth about size and times (the kernel may write
past this process); at the last close the index learns them.
"""

import logging
import os
import stat
from collections import deque
from collections.abc import Callable
from typing import Final

from kvfs.errors import (
    Damaged,
    DeadInode,
    InvalidRequest,
    IsADirectory,
    KvfsError,
    ReadOnly,
    TooLarge,
)
from kvfs.inode_rules import counted, new_record
from kvfs.lifecycle import State
from kvfs.namespace import Namespace
from kvfs.open_inodes import OpenInode
from kvfs.pool import Pool
from kvfs.syscalls import FALLOC_FL_PUNCH_HOLE
from kvfs.types import BackingId, InodeNo, InodeRecord, round_up

_log: Final = logging.getLogger(__name__)
_STAT_BLOCK_BYTES: Final = 512
#: A block that so many ticks in a row could not publish (two seconds) is given up.
_PUBLISH_TRIES: Final = 100
#: off_t is signed: no offset lies behind this (open(2), EOVERFLOW).
_SIZE_MAX_BYTES: Final = (1 << 63) - 1


class Blocks:
    """Creates, opens, measures, truncates and publishes the blocks of one pool."""

    def __init__(self, pool: Pool, namespace: Namespace) -> None:
        self._pool = pool
        self._namespace = namespace
        self._identities = pool.identities
        #: Closed by their last writer, but the index could not be told; and how often. The
        #: writer's handle stays counted, so that the extent goes on telling the truth.
        self._unpublished: deque[tuple[OpenInode, int]] = deque()

    def create(
        self, parent: InodeNo, name: bytes, mode: int, uid: int, gid: int
    ) -> tuple[OpenInode, InodeRecord, BackingId]:
        """Make a draft and open it for writing.

        Raises Exists, NoSpace, NameTooLong, NotADirectory, DeadInode, ReadOnly.
        """
        pool = self._pool
        parent_record = self._namespace.require_free(parent, name)
        pool.require_space(1)
        extent = pool.ready.take(parent, pool.monotonic_s())
        now_ns = pool.clock_ns()
        record = new_record(parent, name, mode, uid, gid, now_ns, parent_record)
        counters = counted(pool.counters, record, 1)
        # Atomic: no checkpoint from here until the draft is in the table of open inodes.
        try:
            with pool.change(counters, begun=extent.ino) as txn:
                self._namespace.enter(txn, extent.ino, record, parent_record)
        except BaseException:
            pool.ready.put_back(extent)
            raise
        opened = pool.open_inodes.enter(extent.ino, writer=True)
        opened.fd = extent.fd
        opened.created_in = parent
        opened.allocated_bytes = extent.reserve_bytes
        pool.space.extra_bytes += extent.reserve_bytes
        return opened, record, extent.backing_id

    def make_file(
        self, parent: InodeNo, name: bytes, mode: int, uid: int, gid: int
    ) -> tuple[InodeNo, InodeRecord]:
        """Make an empty, published file (mknod(2)). Raises what ``create`` raises."""
        opened, _, _ = self.create(parent, name, mode, uid, gid)
        self.close(opened, writer=True)
        return opened.ino, self._namespace.record(opened.ino)

    def open(self, ino: InodeNo, *, writer: bool, truncate: bool) -> OpenInode:
        """Count a handle on file *ino*. Raises DeadInode, IsADirectory, ReadOnly, OSError."""
        if ino in self._pool.graves and not writer and not truncate:
            return self._open_removed(ino)
        record = self._namespace.record(ino)
        if not stat.S_ISREG(record.mode):
            raise IsADirectory if stat.S_ISDIR(record.mode) else InvalidRequest
        if (writer or truncate) and self._pool.settings.read_only:
            raise ReadOnly
        opened = self._pool.open_inodes.enter(ino, writer=writer)
        try:
            if opened.readers + opened.writers == 1:
                opened.allocated_bytes = record.allocated_bytes
            if writer and opened.writers == 1:
                self._begin_writing(opened, record)
            if truncate:
                self.truncate(ino, 0)
        except BaseException:
            self.close(opened, writer=writer)
            raise
        return opened

    def _open_removed(self, ino: InodeNo) -> OpenInode:
        """Open what a LOOKUP found just before its name went: the old bytes, whole."""
        record = self._pool.graves.exhume(ino)
        if record is None or not stat.S_ISREG(record.mode):
            raise DeadInode(f"inode {ino}")
        opened = self._pool.open_inodes.enter(ino, writer=False)
        opened.gone = record
        opened.allocated_bytes = record.allocated_bytes
        return opened

    def enter_reader(self, opened: OpenInode) -> None:
        """Count one more reading handle on an inode that is open already."""
        self._pool.open_inodes.enter(opened.ino, writer=False)

    def extent_fd(self, opened: OpenInode) -> int:
        """Return a descriptor of the inode's extent, O_RDWR if it may be, kept to its last close.

        Raises Damaged when the extent is missing.
        """
        if opened.fd < 0:
            try:
                access = os.O_RDONLY if self._pool.settings.read_only else os.O_RDWR
                opened.fd = self._pool.extents.open(opened.ino, access)
            except Damaged as error:
                self.dismiss(opened, error)
                raise
        return opened.fd

    def dismiss(self, opened: OpenInode, error: Exception) -> bool:
        """Take the name of a block whose bytes are gone: a miss, not an error on a name that stays.

        False if that fails, too.
        """
        if opened.gone is None:
            record = self._namespace.record(opened.ino)
            try:
                self._namespace.unlink(record.parent, record.name)
            except (KvfsError, OSError):
                return False
        self._pool.dismissed += 1
        _log.error("inode %#x dismissed: %s", opened.ino, error)
        return True

    def close(self, opened: OpenInode, *, writer: bool) -> None:
        """Give one handle back; the last writer publishes, the last handle frees.

        A publish that fails is tried again by ``settle``: who closes cannot be told (close(2)
        is answered before), and a whole block is not to be lost to one failed write.
        """
        if writer and opened.writers == 1 and not self._pool.settings.read_only:
            try:
                self._publish(opened)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x is not published yet: %s", opened.ino, error)
                self._unpublished.append((opened, 1))
                return
        self._leave(opened, writer=writer)

    def settle(self) -> None:
        """Try again to publish one of the blocks that could not be; called by the tick.

        In the end it is dismissed.
        """
        if not self._unpublished:
            return
        opened, tries = self._unpublished.popleft()
        try:
            if opened.writers == 1:  # else the next close publishes
                self._publish(opened)
        except (KvfsError, OSError) as error:
            if tries < _PUBLISH_TRIES or not self.dismiss(opened, error):
                self._unpublished.append((opened, tries + 1))
                return
        self._leave(opened, writer=True)

    def close_all(self) -> bool:
        """Close every handle; False if a block could not be published, which stays a draft."""
        self._unpublished.clear()  # their writers are counted, and close once more
        for opened in list(self._pool.open_inodes.values()):
            for _ in range(opened.readers):
                self.close(opened, writer=False)
            for _ in range(opened.writers):
                self.close(opened, writer=True)
        settled = not self._unpublished
        while self._unpublished:
            self._leave(self._unpublished.popleft()[0], writer=True)
        return settled

    def present(self, ino: InodeNo) -> InodeRecord:
        """Return *ino*'s record as of now: an open draft's size and times come from its extent."""
        opened = self._pool.open_inodes.get(ino)
        if opened is None:
            removed = self._pool.graves.record(ino)
            if removed is not None:
                return removed
        record = self._namespace.record(ino)
        if opened is None or not opened.writers or opened.fd < 0:
            return record
        return self._measured(opened, record)

    def is_gone(self, ino: InodeNo) -> bool:
        """Whether living inode *ino* has lost its name (its link count is 0)."""
        opened = self._pool.open_inodes.get(ino)
        return ino in self._pool.graves if opened is None else opened.gone is not None

    def truncate(self, ino: InodeNo, size_bytes: int) -> None:
        """Set the length of file *ino*; growing costs nothing. Raises TooLarge, DeadInode."""
        if size_bytes > _SIZE_MAX_BYTES:
            raise TooLarge(f"{size_bytes} bytes")
        pool = self._pool
        opened = pool.open_inodes.get(ino)
        if opened is not None and opened.writers:
            fd = self.extent_fd(opened)
            pool.syscalls.ftruncate(fd, size_bytes)
            self.note_allocated(opened, pool.extents.allocated_bytes(fd))
            return
        opened = self.open(ino, writer=True, truncate=False)
        try:
            pool.syscalls.ftruncate(self.extent_fd(opened), size_bytes)
        finally:
            self.close(opened, writer=True)

    def allocation(
        self, opened: OpenInode, mode: int, offset_bytes: int, length_bytes: int
    ) -> Callable[[], int]:
        """Return fallocate(2) on an open file as work for a thread.

        The work returns what the extent holds then. Raises NoSpace, TooLarge; the work OSError.
        """
        pool = self._pool
        fd = self.extent_fd(opened)
        end_bytes = offset_bytes + length_bytes
        if end_bytes > _SIZE_MAX_BYTES:
            raise TooLarge(f"{end_bytes} bytes")
        if not mode & FALLOC_FL_PUNCH_HOLE:
            pool.require_space(max(0, min(length_bytes, end_bytes - opened.allocated_bytes)))

        def work() -> int:
            pool.syscalls.fallocate(fd, mode, offset_bytes, length_bytes)
            return pool.extents.allocated_bytes(fd)

        return work

    def admit_write(self, opened: OpenInode, end_bytes: int, size_bytes: int) -> None:
        """Raise NoSpace unless a write of *size_bytes* that ends at *end_bytes* fits."""
        if end_bytes > _SIZE_MAX_BYTES:
            raise TooLarge(f"{end_bytes} bytes")
        growth_bytes = min(end_bytes - opened.allocated_bytes, size_bytes)
        if growth_bytes > 0:
            self._pool.require_space(growth_bytes)

    def note_allocated(self, opened: OpenInode, allocated_bytes: int) -> None:
        """Account what an open extent holds now."""
        self._pool.space.extra_bytes += allocated_bytes - opened.allocated_bytes
        opened.allocated_bytes = allocated_bytes

    # ---- the two ends of writing ----

    def _begin_writing(self, opened: OpenInode, record: InodeRecord) -> None:
        """Make the extent tell the record's times, since it is the truth while writers live.

        A published block is marked as being rewritten: after a crash the record's size would be
        a guess, and after a power loss nothing would tell its old bytes from its new ones.
        """
        pool = self._pool
        fd = self.extent_fd(opened)
        times_ns = (record.atime_ns, record.mtime_ns)
        pool.syscalls.utime(fd, ns=times_ns)
        if record.state == State.PUBLISHED and opened.gone is None:
            with pool.change(pool.counters, begun=opened.ino) as txn:
                txn.put_inode(opened.ino, record._replace(state=State.REWRITE))
            self._identities.withdraw(opened.ino)

    def _measured(self, opened: OpenInode, record: InodeRecord) -> InodeRecord:
        status = self._pool.syscalls.fstat(opened.fd)
        mtime_ns = status.st_mtime_ns
        size_bytes = status.st_size
        if size_bytes == record.size_bytes and (
            mtime_ns == record.mtime_ns or mtime_ns < record.btime_ns
        ):
            return record  # not written; a ready extent is older than its draft
        return record._replace(
            size_bytes=size_bytes,
            allocated_bytes=status.st_blocks * _STAT_BLOCK_BYTES,
            mtime_ns=mtime_ns,
            ctime_ns=max(record.ctime_ns, status.st_ctime_ns),
        )

    def _publish(self, opened: OpenInode) -> None:
        """Tell the index what the last writer left. Raises NoSpace when the index is full."""
        pool = self._pool
        if opened.fd < 0:
            return  # the open failed: nothing was written, nor marked
        before = self._namespace.record(opened.ino)
        record = self._measured(opened, before)
        allocated_bytes = pool.extents.allocated_bytes(opened.fd)
        if allocated_bytes > round_up(record.size_bytes):
            allocated_bytes = pool.extents.trim(opened.fd, record.size_bytes)
        self.note_allocated(opened, allocated_bytes)
        if opened.gone is not None:
            opened.gone = record
            return
        record = record._replace(
            allocated_bytes=allocated_bytes,
            state=State.PUBLISHED,
            sequence=pool.next_sequence(),
        )
        growth_bytes = allocated_bytes - before.allocated_bytes
        counters = pool.counters._replace(
            used_bytes=pool.counters.used_bytes + growth_bytes, sequence=record.sequence
        )
        with pool.change(counters, finished=opened.ino) as txn:
            txn.put_inode(opened.ino, record)
        pool.space.extra_bytes -= growth_bytes
        self._identities.write(opened.ino, record)
        if opened.created_in:
            # A sparse file of a terabyte does not ask for a terabyte the next time.
            size_bytes = min(record.size_bytes, allocated_bytes)
            pool.ready.demand.note_published(opened.created_in, size_bytes, pool.monotonic_s())
            opened.created_in = InodeNo(0)

    def _leave(self, opened: OpenInode, *, writer: bool) -> None:
        if self._pool.open_inodes.leave(opened, writer=writer):
            self._free(opened)

    def _free(self, opened: OpenInode) -> None:
        """After the last handle: close the extent, and unlink it if it has no name any more."""
        if opened.fd >= 0:
            self._pool.syscalls.close(opened.fd)
            opened.fd = -1
        if opened.gone is not None:
            self._pool.unfinished.discard(opened.ino)  # the index learns it with the next one
            self._pool.space.extra_bytes -= opened.allocated_bytes
            self._identities.erase(opened.ino, opened.gone)
