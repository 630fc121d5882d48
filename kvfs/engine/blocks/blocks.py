"""Blocks: files with bytes. Creates, opens, measures and closes them.

While an inode has a writer, its size and times are those of its extent, to which the kernel may
write without this process. The last close copies them to the index.
"""

import contextlib
import logging
import os
import stat
from typing import Final

from kvfs.core.changed import Why
from kvfs.core.errors import Damaged, DeadInode, InvalidRequest, IsADirectory, ReadOnly, TooLarge
from kvfs.core.inode_rules import new_record
from kvfs.core.lifecycle import SETTLED, UNFINISHED
from kvfs.core.rewriting import Answer
from kvfs.core.types import SIZE_MAX_BYTES, InodeNo, InodeRecord
from kvfs.engine.blocks.allocations import Allocations, Lengths
from kvfs.engine.blocks.closes import Doubts, LastCloses
from kvfs.engine.blocks.lease_ends import LeaseEnds
from kvfs.engine.blocks.publishing import Closing, Publishing
from kvfs.engine.blocks.renames import Renames
from kvfs.engine.blocks.served import Emptying, Served
from kvfs.engine.blocks.successors import Successors
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange
from kvfs.engine.rewrite.awaited_opens import AwaitedOpens
from kvfs.engine.rewrite.truncating_open import TruncatingOpens
from kvfs.machine.processes import NOBODY, SERVER, Maker
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.extent_bytes import measured, not_before, require_size, tick_ns
from kvfs.pool.open.open_inodes import Hand, OpenInode
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)


class Blocks:
    """Creates, opens, measures, truncates and publishes the blocks of one pool."""

    def __init__(
        self, pool: Pool, namespace: Namespace, allocator: Allocator, awaited: AwaitedOpens
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._allocator = allocator
        self._awaited = awaited
        self.publishing = Publishing(pool, namespace)
        self.successors = Successors(pool, namespace, allocator)
        self.lease_ends = LeaseEnds(pool, namespace)
        self.allocations = Allocations(pool, allocator, self.publishing)
        self.truncating = truncating = TruncatingOpens(pool, namespace, allocator, awaited)
        self.last_closes = LastCloses(pool, self.publishing, truncating.old, truncating.lock_files)
        self.doubts = Doubts(pool, self.last_closes.close)
        self.served = Served(pool, self.publishing, self.last_closes.close)
        self.renames = Renames(pool, namespace, self.truncating, self.last_closes, self.served)
        self._emptying = Emptying(pool, allocator, self.served)
        self._lengths = Lengths(
            *(pool.extents, pool.background, pool.space, pool.syscalls), allocator, self._emptying
        )

    def create(
        self,
        parent: InodeNo,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        maker: Maker = NOBODY,
        *,
        roomless: bool = False,
        appends: bool = False,
        thread: int = 0,
        request: int = 0,
    ) -> tuple[OpenInode, InodeRecord]:
        """Make a draft and open it for writing; return it with its record.

        If *roomless*, a full pool does not refuse it: its first write asks for space. *request* is
        the number of the client's request.

        Raises Exists, NoSpace, NameTooLong, NotADirectory, DeadInode, ReadOnly.
        """
        pool = self._pool
        self._allocator.require_name()
        parent_record = self._namespace.require_free(parent, name)
        pool.rules.leases.shares.require(pool.rules.policies.of(parent), name, uid, maker)
        extent = self._allocator.take_extent(parent, maker, roomless=roomless)
        now_ns = pool.clock_ns()
        record = new_record(parent, name, mode, uid, gid, now_ns, parent_record)
        record = record._replace(
            mtime_ns=tick_ns(now_ns), maker_tgid=maker.tgid, maker_birth=maker.birth
        )
        # Atomic: no checkpoint from here until the draft is in the table of open inodes.
        try:
            with TreeChange(pool, now_ns, begun=extent.ino, lasting=False) as change:
                change.link(extent.ino, record, why=Why.DRAFTED)
                change.does(request, extent.ino)
        except BaseException:
            pool.open.ready.put_back(extent)
            raise
        opened = pool.open.inodes.enter(extent.ino, writer=True)
        opened.take_extent(extent.fd, extent.backing_id)
        opened.foresee(parent)
        opened.belong_to(maker)
        opened.note_hand(Hand(maker, thread), appends=appends)
        opened.create()
        opened.hold(extent.reserve_bytes)
        pool.space.of(extent.ino).extra_bytes += extent.reserve_bytes
        self._allocator.choose_course(opened, parent)
        return opened, record

    def make_file(
        self,
        parent: InodeNo,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        maker: Maker = NOBODY,
        *,
        request: int = 0,
    ) -> tuple[InodeNo, InodeRecord]:
        """Make an empty, closed file (mknod(2)). Raises what ``create`` raises."""
        opened, _ = self.create(parent, name, mode, uid, gid, maker, request=request)
        self.close(opened, writer=True)
        return opened.ino, self._namespace.record(opened.ino)

    def open(
        self,
        ino: InodeNo,
        *,
        writer: bool,
        truncate: bool,
        appends: bool = False,
        reads: bool = True,
        maker: Maker = NOBODY,
        thread: int = 0,
    ) -> OpenInode:
        """Count a handle on file *ino* for *thread* of *maker*; return the open inode.

        Raises DeadInode, IsADirectory, ReadOnly, NoSpace, OSError. DeadInode also means that
        *truncate* made a new inode, which the caller finds under the name.
        """
        if not writer and not truncate:
            return self.open_to_read(ino, served=maker == SERVER)
        if self._pool.settings.read_only:
            raise ReadOnly
        self.require_extent(ino)
        self.last_closes.publish_now(ino)
        truncating, answer = self.truncating, Answer.EMPTY
        if truncate:
            answer = truncating.admits(ino, thread, maker, reads=reads)
            if answer not in (Answer.EMPTY, Answer.SHARE):
                raise DeadInode(f"inode {ino} keeps its bytes, its name leads to another one")
        elif truncating.refusals:
            truncating.refusals.forget(thread)
        if writer:
            self.successors.require_writable(ino)
        meets = answer is Answer.SHARE or (not truncate and ino in truncating.old)
        meets = meets and writer and truncating.meets(ino, maker)
        self.served.notice_late_write_at(ino)
        record = self._file(ino)
        if truncate and record.state in SETTLED and not record.size_bytes:
            record = self.publishing.touched(ino, record)
        opened = self._pool.open.inodes.enter(ino, writer=writer)
        hidden = opened.emptied and maker != SERVER and record.state in UNFINISHED
        if writer and (opened.stands_in or hidden):
            self._pool.departures.leave(opened, writer=True)
            if opened.stands_in and not truncate:
                truncating.refuse_write(ino, thread, reads=reads)
            raise DeadInode(f"inode {ino} is, or waits for, the new version of what it was")
        try:
            if writer:
                opened.note_hand(Hand(maker, thread), appends=appends)
            self._begin(opened, record, maker, writer=writer, truncate=truncate, appends=appends)
            self._touch(ino, uses=reads and not truncate)
            if meets:
                truncating.meet(opened, record)
            # A writer may have changed it. A shared file (SHARE) was empty: later bytes stay.
            if truncate and answer is Answer.EMPTY and self.present(ino).size_bytes:
                self.truncate(ino, 0, maker)
        except BaseException:
            self.abandon(opened, writer=writer, appends=writer and appends)
            raise
        return opened

    def open_to_read(self, ino: InodeNo, *, served: bool = False) -> OpenInode:
        """Count a reading handle on file *ino*; return the open inode. Every load begins here.

        *served* says that the handle is a file server's.

        Raises DeadInode, IsADirectory, InvalidRequest.
        """
        pool = self._pool
        if ino in pool.departures.removed:
            opened, record = pool.departures.open_removed(ino)
            pool.figures.loaded(ino, record)
            return opened
        self.served.notice_late_write_at(ino)
        record = self._file(ino)
        if record.state in UNFINISHED:
            self.last_closes.publish_now(ino)
            record = self._file(ino)
        opened = pool.open.inodes.enter(ino, writer=False)
        if opened.emptied and not served and record.state in UNFINISHED:
            pool.departures.leave(opened, writer=False)
            raise DeadInode(f"inode {ino} was emptied, and is not whole yet")
        if opened.readers == 1 and not opened.writers:
            opened.hold(record.allocated_bytes)
        self._touch(ino)
        pool.figures.loaded(ino, record)
        return opened

    def require_extent(self, ino: InodeNo) -> None:
        """Raise NotAtHand if the extent of *ino* is not open, and cannot be opened at once."""
        inodes = self._pool.open.inodes
        opened = inodes.get(ino) or inodes.parked.get(ino)
        if opened is None or opened.fd < 0:
            with contextlib.suppress(Damaged):  # its open finds out, and makes it a miss
                self._pool.at_hand.require(ino)

    def _file(self, ino: InodeNo) -> InodeRecord:
        record = self._namespace.record(ino)
        if not stat.S_ISREG(record.mode):
            raise IsADirectory if stat.S_ISDIR(record.mode) else InvalidRequest
        return record

    def _touch(self, ino: InodeNo, *, uses: bool = True) -> None:
        """Note that *ino* is opened; who only writes it does not use what was stored."""
        rules = self._pool.rules
        rules.leases.touch(ino, self._pool.monotonic_s())
        if uses:
            rules.heat.touch(ino)
        else:
            rules.heat.warm(ino, rules.heat.stamp)

    def _begin(
        self,
        opened: OpenInode,
        record: InodeRecord,
        maker: Maker,
        *,
        writer: bool,
        truncate: bool,
        appends: bool,
    ) -> None:
        first = opened.readers + opened.writers == 1
        if first:
            opened.hold(record.allocated_bytes)
        if writer and self.truncating.is_awaited(opened.ino):
            self._awaited.claim(opened)
        grows = appends or not record.size_bytes  # others overwrite old bytes
        if first and writer and (grows or self._pool.open.has_in_memory(opened.ino)):
            self._allocator.choose_course(opened, record.parent)
        if truncate and not writer and self.truncating.is_awaited(opened.ino):
            # Nobody will write it, so it is at once a finished, empty file. It is not awaited any
            # more: else its own opener would be taken for another that writes it, too.
            self._awaited.claim(opened)
            written = self.open(opened.ino, writer=True, truncate=False, maker=maker)
            self.close(written, writer=True)
        if writer:
            if opened.writers == 1:
                opened.forget_holes()
                opened.look_for_holes(record.size_bytes)
            self.extent_fd(opened)
            self.publishing.begin(opened, record, maker, appends=appends)

    def enter_reader(self, opened: OpenInode) -> None:
        """Count one more reading handle on an open inode."""
        self._pool.open.inodes.enter(opened.ino, writer=False)

    def extent_fd(self, opened: OpenInode) -> int:
        """Return a descriptor of the extent, kept open to the last close; O_RDWR if possible.

        Raises Damaged if the extent is missing, or has another size than the block; DeadInode if
        it was evicted while file servers had it open.
        """
        opened.require_bytes()
        if opened.fd < 0:
            try:
                access = os.O_RDONLY if self._pool.settings.read_only else os.O_RDWR
                opened.open_extent(self._pool.at_hand.open(opened.ino, access))
                record = opened.gone or self._pool.index.inode_or_miss(opened.ino)
                require_size(self._pool.syscalls, self._pool.at_hand, opened, record)
            except Damaged as error:
                self.publishing.dismiss(opened, error)
                raise
        return opened.fd

    def close(
        self,
        opened: OpenInode,
        *,
        writer: bool,
        appends: bool = False,
        closing: Closing | None = None,
        awaits_rename: bool = False,
    ) -> None:
        """Close one handle. The last writer's close publishes, the last of all frees the inode.

        *closing* tells how the client closed it. If that is in doubt, ``settle`` closes it later.
        If it *awaits_rename*, a draft under a temporary name may be published by that, or by
        ``settle``.
        """
        if appends:
            opened.stop_appending()
        if closing is not None and self.doubts.raised(opened, closing):
            return
        if writer:
            self.last_closes.close(opened, awaits_rename=awaits_rename)
        else:
            self._pool.departures.leave(opened, writer=False)

    def abandon(self, opened: OpenInode, *, writer: bool, appends: bool = False) -> None:
        """Close a handle that no client received; drop a draft that was just created for it."""
        if writer and opened.writers == 1:
            opened.refuse()
        self.close(opened, writer=writer, appends=appends)

    def settle(self) -> None:
        """Carry out closes that wait for the fate of a writer or for the index, at each tick."""
        self.doubts.run_due(self._pool.monotonic_s())
        self.last_closes.settle()
        self.served.run_due(self._pool.monotonic_s())

    def present(self, ino: InodeNo) -> InodeRecord:
        """Return *ino*'s present record. Size and times of an open draft come from its extent."""
        opened = self._pool.open.inodes.get(ino)
        if opened is None:
            removed = self._pool.departures.removed.record(ino)
            if removed is not None:
                return removed
        elif opened.quiet_writers:
            self.served.notice_late_write(opened)
        record = self._namespace.record(ino)
        if opened is None or not opened.writers or opened.fd < 0 or opened.settling:
            return record
        return not_before(record, measured(self._pool.syscalls, opened, record))

    def is_gone(self, ino: InodeNo) -> bool:
        """Whether inode *ino*, which still exists, has lost its name (its link count is 0)."""
        opened = self._pool.open.inodes.get(ino)
        return ino in self._pool.departures.removed if opened is None else opened.gone is not None

    def truncate(self, ino: InodeNo, size_bytes: int, maker: Maker = NOBODY) -> None:
        """Set the length of file *ino* for *maker*; growing allocates nothing.

        While requests are served, wait until it is settled (``OpenInode.settling``). Raises
        TooLarge, DeadInode, NoSpace, NotAtHand, OSError.
        """
        if size_bytes > SIZE_MAX_BYTES:
            raise TooLarge(f"{size_bytes} bytes")
        self.last_closes.publish_now(ino)
        pool, present = self._pool, self.present(ino)
        self.require_extent(ino)
        if size_bytes > present.size_bytes:
            self.publishing.allocate_ahead(ino)
        empties = maker == SERVER and not size_bytes and self._emptying.is_due(ino, present)
        opened = pool.open.inodes.get(ino)
        keeps = empties or (opened is not None and opened.writers > 0)
        closes = contextlib.ExitStack()  # once, whoever is first
        if opened is None or empties or not keeps:
            maker = maker if empties else NOBODY
            opened = self.open(ino, writer=True, truncate=False, reads=False, maker=maker)
            closes.callback(self.close, opened, writer=True)
        try:
            self.extent_fd(opened)
            if empties:
                self._emptying.begin(opened)
            self._lengths.set(opened, size_bytes, closes.close, keeps=keeps, empties=empties)
        except BaseException:  # what was opened for it is closed again
            closes.close()
            raise
