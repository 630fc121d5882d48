"""O_TRUNC of a block that is final or open elsewhere: the name moves to a new inode.

Readers keep the old bytes whole. The OPEN is answered ESTALE, so that the kernel looks the name up
again. That LOOKUP makes the fresh inode, for this thread alone. So no thread is refused
twice, and a block that a rename makes final between LOOKUP and OPEN is not emptied. Two processes
that write the same temporary name (LMCache) each get an inode of their own, and each renames its
own.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvfs.core.account import Taken
from kvfs.core.errors import KvfsError, NoSpace, NotFound
from kvfs.core.inode_rules import new_record
from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.rewriting import (
    AWAITED,
    LOOKUP,
    LOSES_NAME,
    OPEN,
    REFUSAL,
    Answer,
    Found,
    Refusal,
    Refusals,
    Try,
)
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange
from kvfs.engine.rewrite.awaited_opens import AwaitedOpens
from kvfs.engine.rewrite.findings import Findings, LockFiles, MayEmpty
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.allocator import Allocator
from kvfs.pool.departures import RecentlyRemoved
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.pool.pool import Pool
from kvfs.pool.pool_parts import SpaceParts
from kvfs.pool.space.drive import PoolDrive

_REFUSED_NOTE: Final = b"rewrite/refused"


class ReadOn:
    """Old versions that are still read, and how much of the pool they may hold.

    Readers keep the old bytes whole. Where XFS has one version of a file, a pool then has as many
    as are read. A program that keeps a descriptor of each could hold all of the pool, and others
    would get ENOSPC. So old versions are charged to the owner of the block, whose blocks are not
    rewritten while they are read once it is over its share. A block that was unlinked, or replaced
    by a rename, keeps its space while it is read on XFS, too, and is not counted. A server that
    takes the mount over counts anew.
    """

    def __init__(
        self, inodes: OpenInodes, removed: RecentlyRemoved, space: SpaceParts, share: float
    ) -> None:
        """They may hold *share* of the pool."""
        self._inodes: Final = inodes
        self._removed: Final = removed
        self._space: Final = space
        self._share: Final = share
        #: The owner (uid) of each old version that may still be read.
        self._owners: dict[InodeNo, int] = {}

    def count_version(self, ino: InodeNo, uid: int) -> None:
        """Count *ino*, a block of user *uid* that has just lost its name to a new version."""
        self._owners[ino] = uid

    def held(self, own: Mapping[OpenInode, int]) -> Taken:
        """Return the bytes that old versions hold for readers, by owner.

        *own* counts the handles by which this process itself keeps some of them open.
        """
        held = Taken(self._space.accounts.tenants)
        for ino, uid in list(self._owners.items()):
            opened = self._inodes.get(ino)
            if opened is not None and opened.gone is not None:
                if opened.readers > own.get(opened, 0):
                    held.count(uid, opened.allocated_bytes)
            elif ino not in self._removed:  # which can be opened for a moment
                del self._owners[ino]
        return held

    def is_over(self, uid: int, own: Mapping[OpenInode, int]) -> bool:
        """Whether all old versions hold more than they may, and *uid*'s more than an equal part."""
        held = self.held(own)
        bound_bytes = int(self._share * self._space.taken.usable_bytes)
        return held.total > bound_bytes and held.has_its_part(uid, bound_bytes)


class TruncatingOpens:
    """Fresh inodes waiting for their OPEN, and drafts that lost their name to another writer."""

    def __init__(
        self, pool: Pool, namespace: Namespace, allocator: Allocator, awaited: AwaitedOpens
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._allocator = allocator
        self._awaited = awaited
        #: Opens with O_TRUNC that were answered ESTALE, which the kernel tries once more.
        self.refusals = Refusals()
        self.displaced = awaited.displaced
        self.old = self.displaced.old
        inodes, removed = pool.open.inodes, pool.departures.removed
        self._read_on = ReadOn(inodes, removed, pool.space, pool.settings.old_versions_share)
        self.lock_files = LockFiles(pool.open, pool.rules.policies, pool.syscalls)
        self._findings = Findings(
            *(inodes, removed, pool.monotonic_s), namespace, awaited, self.lock_files
        )

    def admits(self, ino: InodeNo, thread: int, maker: Maker, *, reads: bool = True) -> Answer:
        """Return whether *thread*'s OPEN may EMPTY *ino*, or SHARE it if it is empty.

        With any other answer the name leads to a fresh inode. Since the thread's LOOKUP a rename
        may have made the name final, or another writer may have taken it. So only the LOOKUP of its
        second try tells which inode it means. An unknown *thread* (0) has no second try. Raises
        NoSpace, OSError.
        """
        before, now_s = self.refusals.forget(thread), self._pool.monotonic_s()
        trying = Try.FIRST if before is None else before.at_open(ino, now_s)
        record = self._pool.index.inode(ino)
        found = self._findings.at_open(ino, record, thread, maker)
        answer = OPEN[trying if thread > 0 else Try.UNKNOWN][found]
        if answer is Answer.EMPTY and found is Found.LOST:
            self.displaced.come_for(ino)
        elif answer is Answer.REPLACE and record is not None:
            self.supersede(ino, record, maker, thread)
        elif answer is Answer.RETRY:
            self.refusals.remember(
                thread, ino, self._findings.names(ino, record), now_s, reads=reads
            )
        if before is not None or answer is Answer.RETRY:
            self._write_note()
        return answer

    def refuse_write(self, ino: InodeNo, thread: int, *, reads: bool) -> None:
        """Note that *thread* may not write to *ino*, an old version, and will do a LOOKUP again.

        That leads to the new version if it may be a lock file.
        """
        if thread > 0:
            names, now_s = self._findings.names(ino, None), self._pool.monotonic_s()
            self.refusals.remember(thread, ino, names, now_s, reads=reads, truncates=False)
            self._write_note()

    def meets(self, ino: InodeNo, maker: Maker) -> bool:
        """Whether another process than *maker* writes *ino*, too, or is about to."""
        return ino in self._awaited or self._findings.is_anothers(ino, maker)

    def meet(self, opened: OpenInode, record: InodeRecord) -> None:
        """Note that several processes opened the empty file *opened*, each to write it.

        None of them may publish it by a rename, while others may write to it.
        """
        self.displaced.note_fight(record)
        self.lock_files.meet(opened)

    def _write_note(self) -> None:
        """Note the refusals, for a server that takes the mount over."""
        rows = [(thread, tuple(refusal)) for thread, refusal in self.refusals.items()]
        self._pool.notes.put(_REFUSED_NOTE, rows)

    def recall(self) -> None:
        """Restore what the last server noted; the handles of open inodes are counted already."""
        pool = self._pool
        self.displaced.recall()
        self.old.recall()
        rows = pool.notes.get(_REFUSED_NOTE) or []
        # Nothing was answered since then, so all waits begin anew.
        now_s = pool.monotonic_s()
        for thread, refusal in rows:
            refused = Refusal(*refusal)._replace(until_s=now_s + REFUSAL.wait_s)
            self.refusals[thread] = refused
        until_s = now_s + AWAITED.wait_s
        for ino, reserve_bytes, thread in self._awaited.recall():
            record = pool.index.inode_or_miss(ino)
            if ino in pool.open.inodes.written or record is None or record.state not in UNFINISHED:
                continue  # its OPEN has come, or it was never made
            with contextlib.suppress(KvfsError, OSError):
                extent = pool.open.ready.recall(ino, reserve_bytes)
                pool.space.of(extent.ino).extra_bytes += extent.reserve_bytes
                self._awaited[ino] = (extent, until_s, thread)  # it is noted already

    def looked_up(
        self, ino: InodeNo, thread: int, maker: Maker, may_empty: MayEmpty | None = None
    ) -> InodeNo:
        """Return what *thread*'s LOOKUP, which found *ino*, leads to; at a second try a new inode.

        The kernel checks permissions after this LOOKUP, on the fresh inode. If *ino* is not the
        file that was refused, *may_empty* checks them here. Otherwise a user who may write one file
        could empty others. Raises NoSpace, OSError.
        """
        record = self._pool.index.inode(ino)
        before = self.refusals.get(thread)
        if before is None or record is None:
            return ino
        found = self._findings.at_lookup(ino, record, before, thread, maker, may_empty)
        answer = LOOKUP[before.at_lookup][found]
        if answer is Answer.REPLACE:
            ino = self.supersede(ino, record, maker, thread)
        elif answer is Answer.SHOW:
            self.old.end(ino)  # others append to it: it is emptied for all
        elif answer is Answer.LEAD_BACK:
            ino = self.displaced.promised(record, thread) or ino
        if found is not Found.ON_THE_WAY:
            self.refusals.looked(thread, ino, joins=answer is Answer.JOIN)
            self._write_note()
        return ino

    def refuse_create(self, thread: int, ino: InodeNo, *, truncates: bool, reads: bool) -> None:
        """Note that a CREATE which found *ino* is answered ESTALE and will be tried again.

        The permission to truncate has not been checked yet.
        """
        self.refusals.forget(thread)
        if truncates and thread > 0:
            names = self._findings.names(ino, self._pool.index.inode(ino))
            self.refusals.remember(thread, InodeNo(0), names, self._pool.monotonic_s(), reads=reads)
        self._write_note()

    def supersede(
        self, ino: InodeNo, record: InodeRecord, maker: Maker, thread: int = 0
    ) -> InodeNo:
        """Give *record*'s name to a fresh draft for *thread*; return its inode. Raises OSError.

        Raises NoSpace also for a block that is read, if its owner's old versions hold too much.
        """
        pool = self._pool
        own = self._own_handles()
        hides = self._read_on.is_over(record.uid, own)
        readers = pool.open.inodes.get(ino)
        if hides and readers is not None and readers.readers > own[readers]:
            raise NoSpace(f"user {record.uid}: too many old versions are read (old_versions_share)")
        attributes = {
            key: value
            for key in pool.index.xattrs(ino)
            if (value := pool.index.xattr(ino, key)) is not None
        }
        # The OPEN has checked that there is space, or may be soon. The first write asks again.
        extent = self._allocator.take_extent(record.parent, maker, roomless=True)
        # Making space for the extent may have evicted *ino* itself.
        held = pool.index.inode(ino) is not None
        now_ns = pool.clock_ns()
        parent_record = self._namespace.directory(record.parent)
        fresh = new_record(
            record.parent, record.name, record.mode, record.uid, record.gid, now_ns, parent_record
        )._replace(gid=record.gid, maker_tgid=maker.tgid, maker_birth=maker.birth)
        # Before its name: a server that takes the mount over must not take it for a draft that
        # nobody finishes.
        self._awaited.enter(extent, pool.monotonic_s() + AWAITED.wait_s, thread)
        try:
            with TreeChange(pool, now_ns, begun=extent.ino, keeps=True) as change:
                if held:
                    change.replace(ino, record, extent.ino, fresh, attributes)
                else:
                    change.link(extent.ino, fresh, attributes)
        except BaseException:
            pool.open.ready.put_back(self._awaited.leave(extent.ino))
            raise
        if held:
            self._replaced(ino, record, extent.ino, maker, now_ns, hides=hides)
        else:
            self.old.keep_nothing(extent.ino)
        pool.space.of(extent.ino).extra_bytes += extent.reserve_bytes
        return extent.ino

    def _replaced(
        self,
        ino: InodeNo,
        record: InodeRecord,
        fresh: InodeNo,
        taker: Maker,
        now_ns: int,
        *,
        hides: bool,
    ) -> None:
        """Keep *ino* for those that may still need it, after *fresh* got its name in the index.

        *hides*: the old version is not shown to others, so that it gets no new readers.
        """
        keeps = LOSES_NAME[self._findings.loser(ino, record, taker)]
        if keeps.for_rename:
            self._awaited.displace(ino, record)
            self.displaced.note_fight(record)
        if hides and keeps.stands_in:
            self.old.keep_nothing(fresh)
        else:
            self.old.keep(ino, fresh, stands_in=keeps.stands_in)
            if record.state not in UNFINISHED:
                self._read_on.count_version(ino, record.uid)
        self._namespace.keep_removed(ino, record, now_ns)
        self._pool.kernel.unnamed(ino)

    def is_awaited(self, ino: InodeNo) -> bool:
        """Whether *ino* is a fresh inode that nobody opened yet."""
        return ino in self._awaited

    # ---- drafts without a name ----

    def refuse_unfinished(self, ino: InodeNo, who: Maker) -> None:
        """Raise NotFound if *ino* is the draft of another process, and *who* has lost its own.

        Then another process has renamed *who*'s draft, and the name belongs to another writer now.
        """
        opened = self._pool.open.inodes.get(ino)
        if opened is not None and opened.mixes:
            raise NotFound(f"inode {ino} is being written by several processes")
        if ino in self._awaited or (opened is not None and opened.unfinished and opened.writers):
            maker = NOBODY if opened is None else opened.maker
            if who.is_one and maker.is_one and maker != who:
                raise NotFound(f"inode {ino} is being written by another process")

    def nameless_bytes(self, drive: PoolDrive) -> int:
        """Return what ``give_way`` would free on *drive*: of inodes that only these tables keep."""
        drive_of = self._pool.space.drives.of
        return sum(
            opened.allocated_bytes
            for opened, times in self._own_handles().items()
            if opened.readers == times and not opened.writers
            if drive_of(opened.ino) is drive
        )

    @property
    def old_version_bytes(self) -> int:
        """Bytes that readers keep of old versions of rewritten blocks."""
        return self._read_on.held(self._own_handles()).total

    def _own_handles(self) -> Counter[OpenInode]:
        """Return the inodes that the tables here have open, and how often each."""
        return Counter([*self.old.may_go(), *self.displaced.may_go()])

    def give_way(self) -> None:
        """Give up old versions, and nameless drafts without a writer, because space is needed."""
        self.old.give_way()
        self.displaced.give_way()

    def run_due(self, now_s: float) -> None:
        """Give up what has waited too long."""
        self.old.run_due()
        self.refusals.forget_expired(now_s)
        self.lock_files.run_due(now_s)
        while self._awaited and next(iter(self._awaited.values()))[1] <= now_s:
            self._drop_awaited()
        self.displaced.run_due(now_s)

    def _try_trim(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # a reader may still have the extent
            self._pool.extents.trim(fd, 0)

    def close(self) -> None:
        """Give up all, because the pool stops."""
        self.old.close()
        while self._awaited:
            self._drop_awaited()
        self.displaced.close()

    def _drop_awaited(self) -> None:
        """Drop the oldest fresh inode, which nobody has opened, and its name."""
        ino = next(iter(self._awaited))
        extent = self._awaited.leave(ino)
        self._pool.space.of(extent.ino).extra_bytes -= extent.reserve_bytes
        device = self._pool.background.of(ino).device
        device.submit(lambda: self._try_trim(extent.fd))
        self._pool.open.ready.let_go(extent)
        if self._pool.index.inode_or_miss(ino) is not None:
            try:
                self._namespace.lose(ino)
            except (KvfsError, OSError):
                return
        self._pool.unfinished.discard(ino)
