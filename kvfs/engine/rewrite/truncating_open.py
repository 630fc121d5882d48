"""O_TRUNC of a block that is final or open elsewhere: the name moves to a new inode.

Readers keep the old bytes whole. The OPEN is answered ESTALE; the kernel looks the name up again by
itself, and that LOOKUP makes the fresh inode, for this thread alone: nobody is refused twice, and a
rename between LOOKUP and OPEN does not empty what it made final. Two nodes that write the same
temporary name (LMCache) each get an inode of their own this way, and each renames its own.
"""

import contextlib
import stat
from typing import Protocol

from kvfs.core.errors import KvfsError, NotFound
from kvfs.core.inode_rules import new_record
from kvfs.core.lifecycle import UNFINISHED, State, is_temporary
from kvfs.core.rewriting import (
    AWAITED,
    CONTENDED,
    LOOKUP,
    LOSES_NAME,
    OPEN,
    Answer,
    Found,
    Loser,
    Try,
)
from kvfs.core.second_tries import Place, Recent, Refusal, Refusals
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange
from kvfs.engine.rewrite.awaited_opens import AwaitedOpens
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.allocator import Allocator
from kvfs.pool.pool import Pool


class MayEmpty(Protocol):
    """Says whether the thread whose request this is may empty a file, and read it if it *reads*."""

    def __call__(self, record: InodeRecord, /, *, reads: bool) -> bool:
        """Answer for the file of *record*."""


class TruncatingOpens:
    """Fresh inodes waiting for their OPEN, and drafts that lost their name to another writer."""

    def __init__(
        self, pool: Pool, namespace: Namespace, allocator: Allocator, awaited: AwaitedOpens
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._allocator = allocator
        self._awaited = awaited
        #: Truncating opens that were answered ESTALE, which the kernel tries once more.
        self.refusals = Refusals()
        self._contended: Recent[Place, bool] = Recent(CONTENDED)
        self.displaced = awaited.displaced
        self.old = self.displaced.old

    def admits(self, ino: InodeNo, thread: int, maker: Maker, *, reads: bool = True) -> bool:
        """Whether *thread* may empty *ino* itself; if not, its name leads to a fresh inode.

        The name may have changed hands since the thread's LOOKUP (a rename made it final, another
        writer took it), so that only the LOOKUP of its second try tells which one it means. A
        *thread* that is not known (0) has no second chance. Raises NoSpace, OSError.
        """
        before, now_s = self.refusals.forget(thread), self._pool.monotonic_s()
        trying = Try.FIRST if before is None else before.at_open(ino, now_s)
        record = self._pool.index.inode(ino)
        found = self._found_at_open(ino, record, thread, maker)
        answer = OPEN[trying if thread > 0 else Try.UNKNOWN][found]
        if answer is Answer.EMPTY and found is Found.LOST:
            self.displaced.come_for(ino)
        elif answer is Answer.REPLACE and record is not None:
            self.supersede(ino, record, maker, thread)
        elif answer is Answer.RETRY:
            self.refusals.note(thread, ino, self._names(ino, record), now_s, reads=reads)
        return answer is Answer.EMPTY

    def _found_at_open(
        self, ino: InodeNo, record: InodeRecord | None, thread: int, maker: Maker
    ) -> Found:
        if record is not None:
            return Found.TAKEN if self._due(ino, record, thread, maker) else Found.FREE
        if self.displaced.is_promised(ino, thread):
            return Found.LOST
        return Found.NAMELESS if ino in self._pool.open_inodes else Found.NOTHING

    def _names(self, ino: InodeNo, record: InodeRecord | None) -> tuple[Place, ...]:
        """Return what a thread that wants *ino* may have called it; none if nobody knows."""
        if record is None:
            opened = self._pool.open_inodes.get(ino)
            record = self._pool.recently_removed.record(ino) if opened is None else opened.gone
        former = self._namespace.former_names.of(ino, self._pool.monotonic_s())
        present = None if record is None else (record.parent, record.name)
        return tuple(name for name in (present, former) if name is not None)

    def looked_up(
        self, ino: InodeNo, thread: int, maker: Maker, may_empty: MayEmpty | None = None
    ) -> InodeNo:
        """Return what *thread*'s LOOKUP that found *ino* leads to: at a second try a fresh inode.

        Behind this LOOKUP the kernel checks permissions; what was not refused to the thread before
        *may_empty* checks here, or who may write one file could empty others. Raises NoSpace,
        OSError.
        """
        record = self._pool.index.inode(ino)
        before = self.refusals.of(thread)
        if before is None or record is None:
            return ino
        found = self._found_at_lookup(ino, record, before, thread, maker, may_empty)
        answer = LOOKUP[before.at_lookup][found]
        if answer is Answer.REPLACE:
            ino = self.supersede(ino, record, maker, thread)
        elif answer is Answer.SHOW:
            self.old.end(ino)  # what others append to is emptied for all
        elif answer is Answer.LEAD_BACK:
            ino = self.displaced.promised(record, thread) or ino
        if found is not Found.ON_THE_WAY:
            self.refusals.looked(thread, ino)
        return ino

    def _found_at_lookup(
        self,
        ino: InodeNo,
        record: InodeRecord,
        before: Refusal,
        thread: int,
        maker: Maker,
        may_empty: MayEmpty | None,
    ) -> Found:
        is_meant = (record.parent, record.name) in before.names
        if not stat.S_ISREG(record.mode):
            return Found.ANOTHER if is_meant else Found.ON_THE_WAY
        if before.at_lookup is Try.LOOKED:
            lost = self.displaced.promised(record, thread)
            return Found.ANOTHER if lost is None else Found.LOST
        if not (is_meant and self._means(ino, record, before, may_empty)):
            return Found.ANOTHER
        if self._due(ino, record, thread, maker):
            return Found.TAKEN
        appended = ino in self.old and self._is_anothers(ino, maker)
        return Found.APPENDED if appended else Found.FREE

    def _means(
        self, ino: InodeNo, record: InodeRecord, before: Refusal, may_empty: MayEmpty | None
    ) -> bool:
        """Whether the LOOKUP that tries *before* again may empty *ino*."""
        if before.until_s <= self._pool.monotonic_s():
            return False
        if ino == before.ino:
            return True
        return may_empty is not None and may_empty(record, reads=before.reads)

    def _is_anothers(self, ino: InodeNo, maker: Maker) -> bool:
        """Whether another process than *maker* writes *ino*; not one that waits for its OPEN."""
        opened = self._pool.open_inodes.get(ino)
        return opened is not None and opened.writers > 0 and opened.maker != maker

    def refuse_create(self, thread: int, ino: InodeNo, *, truncates: bool, reads: bool) -> None:
        """A CREATE that found *ino* is answered ESTALE: what follows is its second try.

        Nobody has checked the permission to truncate yet.
        """
        self.refusals.forget(thread)
        if truncates and thread > 0:
            names = self._names(ino, self._pool.index.inode(ino))
            self.refusals.note(thread, InodeNo(0), names, self._pool.monotonic_s(), reads=reads)

    def _due(self, ino: InodeNo, record: InodeRecord, thread: int, maker: Maker) -> bool:
        """Whether a truncating open of *ino* by *thread* of *maker* must get another inode."""
        awaited = self._awaited.get(ino)
        if awaited is not None:
            return awaited[2] != thread
        opened = self._pool.open_inodes.get(ino)
        if opened is not None and opened.writers:
            temporary = is_temporary(record.name)
            if opened.is_shared_with(maker, thread, temporary=temporary):
                return False
        if record.state in UNFINISHED:
            return opened is not None and opened.writers > 0
        return record.size_bytes > 0 or opened is not None

    def supersede(
        self, ino: InodeNo, record: InodeRecord, maker: Maker, thread: int = 0
    ) -> InodeNo:
        """Give *record*'s name to a fresh draft for *thread*. Raises NoSpace, OSError."""
        pool = self._pool
        attributes = {
            key: value
            for key in pool.index.xattrs(ino)
            if (value := pool.index.xattr(ino, key)) is not None
        }
        # Its OPEN found that there is room, or that some may come: the first write asks again.
        extent = self._allocator.take_extent(record.parent, roomless=True)
        # To make room for the extent *ino* itself may have been evicted.
        held = pool.index.inode(ino) is not None
        now_ns = pool.clock_ns()
        parent_record = self._namespace.directory(record.parent)
        fresh = new_record(
            record.parent, record.name, record.mode, record.uid, record.gid, now_ns, parent_record
        )._replace(gid=record.gid, maker_tgid=maker.tgid, maker_birth=maker.birth)
        try:
            with TreeChange(pool, now_ns, begun=extent.ino) as change:
                if held:
                    change.replace(ino, record, extent.ino, fresh, attributes)
                else:
                    change.link(extent.ino, fresh, attributes)
        except BaseException:
            pool.ready.put_back(extent)
            raise
        if held:
            self._replaced(ino, record, extent.ino, maker, now_ns)
        else:
            self.old.keep_nothing(extent.ino)
        pool.space.extra_bytes += extent.reserve_bytes
        self._awaited[extent.ino] = (extent, pool.monotonic_s() + AWAITED.wait_s, thread)
        return extent.ino

    def _replaced(
        self, ino: InodeNo, record: InodeRecord, fresh: InodeNo, taker: Maker, now_ns: int
    ) -> None:
        """After the index gave the name of *ino* to *fresh*: who may need *ino* still."""
        self._pool.pins.move(ino, fresh)
        keeps = LOSES_NAME[self._loser(ino, record, taker)]
        if keeps.for_rename:
            self._awaited.displace(ino, record)
            place = (record.parent, record.name)
            self._contended.note(place, True, self._pool.monotonic_s())
        self.old.keep(ino, fresh, stands_in=keeps.stands_in)
        self._namespace.keep_removed(ino, record, now_ns)
        self._pool.kernel.unnamed(ino)

    def is_awaited(self, ino: InodeNo) -> bool:
        """Whether *ino* is a fresh inode that nobody opened yet."""
        return ino in self._awaited

    # ---- drafts without a name ----

    def _loser(self, ino: InodeNo, record: InodeRecord, taker: Maker) -> Loser:
        """Return what *ino* is, whose name *taker* takes."""
        if ino in self._awaited:
            return Loser.FRESH
        opened = self._pool.open_inodes.get(ino)
        if record.state in UNFINISHED:
            return Loser.DRAFT if opened is not None and opened.writers else Loser.REST
        if record.state == State.UNRENAMED:
            return Loser.TEMPORARY
        is_leased = record.state == State.LEASED
        if is_temporary(record.name):
            return Loser.TEMPORARY if is_leased else Loser.REST
        if is_leased and taker != (record.maker_tgid, record.maker_birth):
            return Loser.ANOTHERS
        return Loser.REST if record.state == State.REWRITE else Loser.FINAL

    def fought_over(self, parent: InodeNo, name: bytes) -> bool:
        """Whether writers took this name from each other a moment ago."""
        return self._contended.of((parent, name), self._pool.monotonic_s()) is not None

    def refuse_unfinished(self, ino: InodeNo, who: Maker) -> None:
        """Raise NotFound if *ino* is the draft of another process than *who*, who lost his own.

        Somebody's rename took the loser's draft along; the name is another writer's by now.
        """
        opened = self._pool.open_inodes.get(ino)
        if ino in self._awaited or (opened is not None and opened.unfinished and opened.writers):
            maker = NOBODY if opened is None else opened.maker
            if who.is_one and maker.is_one and maker != who:
                raise NotFound(f"inode {ino} is being written by another process")

    def give_way(self) -> None:
        """Forget old versions, and drafts without a name that nobody writes: room is needed."""
        self.old.give_way()
        self.displaced.give_way()

    def tick(self, now_s: float) -> None:
        """End what has waited too long."""
        self.old.tick()
        self.refusals.tick(now_s)
        while self._awaited and next(iter(self._awaited.values()))[1] <= now_s:
            self._drop_awaited()
        self.displaced.tick(now_s)

    def close(self) -> None:
        """End everything: the pool stops."""
        self.old.close()
        while self._awaited:
            self._drop_awaited()
        self.displaced.close()

    def _drop_awaited(self) -> None:
        """Nobody opened the fresh inode: its name is a draft that nobody writes."""
        ino, (extent, _, _) = self._awaited.popitem(last=False)
        self._pool.space.extra_bytes -= extent.reserve_bytes
        with contextlib.suppress(OSError):  # who reads it, or did, may keep the extent
            self._pool.extents.trim(extent.fd, 0)
        self._pool.ready.let_go(extent)
        if (record := self._pool.index.inode_or_miss(ino)) is not None:
            try:
                self._pool.kernel.unnamed(self._namespace.unlink(record.parent, record.name))
            except (KvfsError, OSError):
                return
        self._pool.unfinished.discard(ino)
