"""O_TRUNC of a block that is final or open elsewhere: the name moves to a new inode.

Readers keep the old bytes whole. The OPEN is answered ESTALE; the kernel looks the name up again by
itself, and that LOOKUP makes the fresh inode, for this thread alone: nobody is refused twice, and a
rename between LOOKUP and OPEN does not empty what it made final. Two nodes that write the same
temporary name (LMCache) each get an inode of their own this way, and each renames its own.
"""

import contextlib
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from kvfs.core.errors import KvfsError, NotFound
from kvfs.core.former_names import Place
from kvfs.core.fought_over import FoughtOver
from kvfs.core.inode_rules import new_record
from kvfs.core.lifecycle import UNFINISHED, State, is_temporary
from kvfs.core.refusal import RETRY_S, Refusal, Refusals
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange
from kvfs.engine.rewrite.displaced import DisplacedDrafts
from kvfs.engine.rewrite.old_versions import OldVersions
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfs.pool.ready_extents import ReadyExtent

#: The kernel's second OPEN follows at once; after this the opener has died in between.
_AWAITED_S: Final = 5.0


class MayEmpty(Protocol):
    """Says whether the thread whose request this is may empty a file, and read it if it *reads*."""

    def __call__(self, record: InodeRecord, /, *, reads: bool) -> bool:
        """Answer for the file of *record*."""


def empties_nothing(_record: InodeRecord, /, *, reads: bool) -> bool:
    """Answer for those of whom nothing is known."""
    del reads
    return False


class TruncatingOpens:
    """Fresh inodes waiting for their OPEN, and drafts that lost their name to another writer."""

    def __init__(self, pool: Pool, namespace: Namespace) -> None:
        self._pool = pool
        self._namespace = namespace
        #: With its extent, until when, and the thread whose OPEN is to come.
        self._awaited: OrderedDict[InodeNo, tuple[ReadyExtent, float, int]] = OrderedDict()
        #: Truncating opens that were answered ESTALE, which the kernel tries once more.
        self.refusals = Refusals()
        self._fought_over = FoughtOver()
        self.old = OldVersions(pool)
        self.displaced = DisplacedDrafts(pool, namespace, self.old)
        #: Told each inode that lost its name: a backing id would hold on to its space.
        self.unnamed: Callable[[InodeNo], None] = lambda _ino: None
        pool.forget_nameless = self.give_way
        namespace.promised = self._promised_to_an_open
        namespace.keep_promise = self._keep_promise

    def admits(self, ino: InodeNo, thread: int, maker: Maker, *, reads: bool = True) -> bool:
        """Whether *thread* may empty *ino* itself; if not, its name leads to a fresh inode.

        The name may have changed hands since the thread's LOOKUP (a rename made it final, another
        writer took it), so that only the LOOKUP of its second try tells which one it means. A
        *thread* that is not known (0) has no second chance. Raises NoSpace, OSError.
        """
        before = self.refusals.forget(thread)
        by_handle = before is not None and before.is_met_by(ino, self._pool.monotonic_s())
        if (record := self._pool.index.inode(ino)) is None:
            if self.displaced.is_promised(ino, thread):
                self.displaced.come_for(ino)
                return True
            if by_handle and ino in self._pool.open_inodes:
                return True
        elif by_handle or not self._due(ino, record, thread, maker):
            return True
        elif thread <= 0:
            self.supersede(ino, record, maker, thread)
            return False
        # There is no third try: after the second the next OPEN of this thread is another open(2)'s
        # first, and taken for one by handle it would empty what has become final meanwhile.
        if thread > 0 and not (before is not None and before.is_followed_by(ino)):
            self._refuse(thread, ino, self._names(ino, record), reads=reads)
        return False

    def _refuse(
        self, thread: int, ino: InodeNo, names: tuple[Place, ...], *, reads: bool = True
    ) -> None:
        until_s = self._pool.monotonic_s() + RETRY_S
        self.refusals.note(thread, Refusal(ino, until_s, names, reads))

    def _names(self, ino: InodeNo, record: InodeRecord | None) -> tuple[Place, ...]:
        """Return what a thread that wants *ino* may have called it; none if nobody knows."""
        if record is None:
            opened = self._pool.open_inodes.get(ino)
            record = self._pool.recently_removed.record(ino) if opened is None else opened.gone
        former = self._namespace.former_names.of(ino, self._pool.monotonic_s())
        present = None if record is None else (record.parent, record.name)
        return tuple(name for name in (present, former) if name is not None)

    def looked_up(
        self, ino: InodeNo, thread: int, maker: Maker, may_empty: MayEmpty = empties_nothing
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
        is_file, is_meant = stat.S_ISREG(record.mode), (record.parent, record.name) in before.names
        if is_file and before.led_to is not None:
            ino = self.displaced.promised(record, thread) or ino
        elif is_file and is_meant and self._means(ino, record, before, may_empty):
            if self._due(ino, record, thread, maker):
                ino = self.supersede(ino, record, maker, thread)
            elif ino in self.old and self._is_anothers(ino, maker):
                self.old.end(ino)  # what others append to is emptied for all
        if is_file or is_meant:  # else it is still on its way to the file
            self.refusals.looked(thread, ino)
        return ino

    def _means(
        self, ino: InodeNo, record: InodeRecord, before: Refusal, may_empty: MayEmpty
    ) -> bool:
        """Whether the LOOKUP that tries *before* again may empty *ino*."""
        if before.until_s <= self._pool.monotonic_s():
            return False
        return ino == before.ino or may_empty(record, reads=before.reads)

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
            self._refuse(thread, InodeNo(0), names, reads=reads)

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
        extent = pool.take_extent(record.parent, roomless=True)
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
        self._awaited[extent.ino] = (extent, pool.monotonic_s() + _AWAITED_S, thread)
        return extent.ino

    def _replaced(
        self, ino: InodeNo, record: InodeRecord, fresh: InodeNo, taker: Maker, now_ns: int
    ) -> None:
        """After the index gave the name of *ino* to *fresh*: who may need *ino* still."""
        self._pool.pins.move(ino, fresh)
        if ino in self._awaited or self._may_be_renamed(ino, record, taker):
            until_s = self._displace(ino, record)
            self._fought_over.note(record.parent, record.name, until_s)
        self.old.keep(ino, record, fresh)
        self._namespace.keep_removed(ino, record, now_ns)
        self.unnamed(ino)

    def _promised_to_an_open(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Keep *ino*, which lost its name, if its OPEN is still to come: the kernel tries once."""
        due = ino in self._awaited
        if due and ino not in self.displaced:
            self._displace(ino, record)
        return due

    def _displace(self, ino: InodeNo, record: InodeRecord) -> float:
        awaited = self._awaited.get(ino)
        return self.displaced.keep(ino, record, 0 if awaited is None else awaited[2])

    def _keep_promise(self, ino: InodeNo) -> None:
        promised = self._pool.open_inodes[ino]
        promised.create()
        self.claim(promised)

    def claim(self, opened: OpenInode) -> None:
        """The OPEN that a fresh inode waited for has come."""
        extent, _, _ = self._awaited.pop(opened.ino)
        if opened.fd >= 0:
            self._pool.ready.let_go(extent)  # a reader was faster and has it open already
        else:
            opened.fd = extent.fd
            opened.fresh_id = extent.backing_id
        opened.allocated_bytes = extent.reserve_bytes

    def is_awaited(self, ino: InodeNo) -> bool:
        """Whether *ino* is a fresh inode that nobody opened yet."""
        return ino in self._awaited

    # ---- drafts without a name ----

    def _may_be_renamed(self, ino: InodeNo, record: InodeRecord, taker: Maker) -> bool:
        """Whether the writer of *ino*, whose name *taker* takes, is on its way to a rename."""
        if record.state in UNFINISHED:
            opened = self._pool.open_inodes.get(ino)
            return opened is not None and opened.writers > 0
        if record.state != State.LEASED:
            return False
        return is_temporary(record.name) or taker != (record.maker_tgid, record.maker_birth)

    def fought_over(self, parent: InodeNo, name: bytes) -> bool:
        """Whether writers took this name from each other a moment ago."""
        return self._fought_over.is_still(parent, name, self._pool.monotonic_s())

    def refuse_unfinished(self, ino: InodeNo, who: Maker) -> None:
        """Raise NotFound if *ino* is the draft of another process than *who*, who lost his own.

        Somebody's rename took the loser's draft along; the name is another writer's by now.
        """
        opened = self._pool.open_inodes.get(ino)
        if ino in self._awaited or (opened is not None and opened.unfinished and opened.writers):
            maker = NOBODY if opened is None else opened.maker
            if who != NOBODY and maker not in (NOBODY, who):
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
                self.unnamed(self._namespace.unlink(record.parent, record.name))
            except (KvfsError, OSError):
                return
        self._pool.unfinished.discard(ino)
