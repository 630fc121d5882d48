"""O_TRUNC of a block somebody has, or that is final: the name moves to a fresh inode.

Readers keep the old bytes whole. The OPEN is answered ESTALE; the kernel looks the name up again by
itself, and that LOOKUP makes the fresh inode, for this thread alone: nobody is refused twice, and a
rename between LOOKUP and OPEN does not empty what it made final. Two nodes that write the same
temporary name (LMCache) each get an inode of their own this way, and each renames its own.
"""

import contextlib
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from kvfs import evictable
from kvfs.dropping import drop
from kvfs.errors import KvfsError, NotFound
from kvfs.fought_over import FoughtOver
from kvfs.inode_rules import counted, new_record, refuse_mismatch
from kvfs.lifecycle import UNFINISHED, State, is_temporary
from kvfs.makers import NOBODY, Maker
from kvfs.namespace import Namespace
from kvfs.old_versions import OldVersions
from kvfs.open_inodes import OpenInode
from kvfs.pool import Pool
from kvfs.refusal import Refusal
from kvfs.types import InodeNo, InodeRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfs.ready import ReadyExtent

#: The kernel's second OPEN follows at once; after this the opener has died in between.
_AWAITED_S: Final = 5.0
#: And so does its LOOKUP, within the same open(2).
_RETRY_S: Final = 1.0
#: Drafts without a name are kept for the writers that will rename them: for so long, so many.
_DISPLACED_S: Final = 60.0
_DISPLACED_MAX: Final = 64


class Displaced(NamedTuple):
    """A draft whose name another writer took; it is forgotten at *until_s*."""

    parent: InodeNo
    name: bytes
    opened: OpenInode
    until_s: float
    #: Whose OPEN of it is still to come, 0 if it was opened.
    thread: int


class Superseding:
    """Fresh inodes waiting for their OPEN, and drafts that lost their name to another writer."""

    def __init__(self, pool: Pool, namespace: Namespace) -> None:
        self._pool = pool
        self._namespace = namespace
        #: With its extent, until when, and the thread whose OPEN is to come.
        self._awaited: OrderedDict[InodeNo, tuple[ReadyExtent, float, int]] = OrderedDict()
        #: By thread: its truncating OPEN was answered ESTALE, its next LOOKUP is the second try.
        self._refused: OrderedDict[int, Refusal] = OrderedDict()
        self._fought_over = FoughtOver()
        #: Oldest first; few, so that they are searched.
        self._displaced: OrderedDict[InodeNo, Displaced] = OrderedDict()
        self.old = OldVersions(pool)
        #: Told each inode that lost its name: a backing id would hold on to its space.
        self.unnamed: Callable[[InodeNo], None] = lambda _ino: None
        pool.forget_nameless = self.give_way
        namespace.promised = self._promised_to_an_open
        namespace.keep_promise = self._keep_promise

    def admits(self, ino: InodeNo, thread: int, maker: Maker) -> bool:
        """Whether *thread* may empty *ino* itself; if not, its name leads to a fresh inode.

        The name may have changed hands since the thread's LOOKUP (a rename made it final, another
        writer took it), so that only the LOOKUP of its second try tells which one it means. A
        *thread* that is not known (0) has no second chance. Raises NoSpace, OSError.
        """
        before = self._refused.pop(thread, None)
        by_handle = before is not None and before.is_met_by(ino, self._pool.monotonic_s())
        if (record := self._pool.index.inode(ino)) is None:
            if self._is_promised(ino, thread):
                self._displaced[ino] = self._displaced[ino]._replace(thread=0)
                return True
            if by_handle and ino in self._pool.open_inodes:
                return True
        elif by_handle or not self._due(ino, record, thread):
            return True
        elif thread <= 0:
            self.supersede(ino, record, maker, thread)
            return False
        # There is no third try: after the second the next OPEN of this thread is another open(2)'s
        # first, and taken for one by handle it would empty what has become final meanwhile.
        if thread > 0 and not (before is not None and before.looked):
            until_s = self._pool.monotonic_s() + _RETRY_S
            self._refused[thread] = Refusal(ino, until_s, looked=False)
        return False

    @property
    def retrying(self) -> bool:
        """Whether a LOOKUP may be a second try."""
        return bool(self._refused)

    def looked_up(self, ino: InodeNo, thread: int, maker: Maker) -> InodeNo:
        """Return what *thread*'s LOOKUP that found *ino* leads to: at a second try a fresh inode.

        Raises NoSpace, OSError.
        """
        record = self._pool.index.inode(ino)
        before = self._refused.get(thread)
        if before is None or record is None or not stat.S_ISREG(record.mode):
            return ino  # or it is still on its way to the file
        if before.looked:
            return self._promised(record, thread) or ino
        self.found_nothing(thread)
        if not self._holds(before) or not self._due(ino, record, thread):
            return ino
        return self.supersede(ino, record, maker, thread)

    def found_nothing(self, thread: int) -> None:
        """*thread* has looked the name up at its second try; what it finds later is another's."""
        before = self._refused.get(thread)
        if before is not None:
            self._refused[thread] = before._replace(looked=True)

    def forget(self, thread: int) -> None:
        """*thread* is done with its second try: it creates the file."""
        self._refused.pop(thread, None)

    def refuse_create(self, thread: int, *, truncates: bool) -> None:
        """A CREATE of *thread* is answered ESTALE: what follows is its second try.

        The permission to truncate is not checked yet, so that its LOOKUP supersedes nothing.
        """
        self._refused.pop(thread, None)
        if truncates and thread > 0:
            until_s = self._pool.monotonic_s() + _RETRY_S
            self._refused[thread] = Refusal(InodeNo(0), until_s, looked=True)

    def _holds(self, refusal: Refusal) -> bool:
        return refusal.until_s > self._pool.monotonic_s()

    def _due(self, ino: InodeNo, record: InodeRecord, thread: int) -> bool:
        """Whether a truncating open of *ino* must get another inode."""
        awaited = self._awaited.get(ino)
        if awaited is not None:
            return awaited[2] != thread
        opened = self._pool.open_inodes.get(ino)
        if record.state in UNFINISHED:
            return opened is not None and opened.writers > 0
        return record.size_bytes > 0 or opened is not None

    def _is_promised(self, ino: InodeNo, thread: int) -> bool:
        """Whether *ino* was *thread*'s fresh inode when another writer took the name."""
        displaced = self._displaced.get(ino)
        return displaced is not None and displaced.thread == thread > 0

    def _promised(self, record: InodeRecord, thread: int) -> InodeNo | None:
        """Return *thread*'s fresh inode that lost *record*'s name between two looks of one try."""
        name = (record.parent, record.name)
        lost = (ino for ino, kept in self._displaced.items() if (kept.parent, kept.name) == name)
        return next((ino for ino in lost if self._is_promised(ino, thread)), None)

    def supersede(
        self, ino: InodeNo, record: InodeRecord, maker: Maker, thread: int = 0
    ) -> InodeNo:
        """Give *record*'s name to a fresh draft for *thread*. Raises NoSpace, OSError."""
        pool = self._pool
        attributes = {key: pool.index.xattr(ino, key) for key in pool.index.xattrs(ino)}
        extent = pool.take_extent(record.parent)
        # To make room for the extent *ino* itself may have been evicted.
        held = pool.index.inode(ino) is not None
        now_ns = pool.clock_ns()
        parent_record = self._namespace.directory(record.parent)
        fresh = new_record(
            record.parent, record.name, record.mode, record.uid, record.gid, now_ns, parent_record
        )._replace(gid=record.gid, maker_tgid=maker.tgid, maker_birth=maker.birth)
        counters = counted(pool.counters, fresh, 1)
        if held:
            counters = counted(counters, record, -1)
        try:
            with pool.change(counters, begun=extent.ino) as txn:
                for key, value in attributes.items():
                    if value is not None:
                        txn.put_xattr(extent.ino, key, value)
                if held:
                    drop(txn, pool.open_inodes, ino, record)
                    txn.put_inode(extent.ino, fresh)
                    txn.put_name(record.parent, record.name, extent.ino)
                else:
                    self._namespace.enter(txn, extent.ino, fresh, parent_record)
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
            self._displace(ino, record)
            self._fought_over.note(record.parent, record.name, self._displaced[ino].until_s)
        self.old.keep(ino, record, fresh)
        self._namespace.bury(ino, record, now_ns)
        self.unnamed(ino)

    def _promised_to_an_open(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Keep *ino*, about to be buried, if its OPEN is still to come: the kernel tries once."""
        due = ino in self._awaited
        if due and ino not in self._displaced:
            self._displace(ino, record)
        return due

    def _keep_promise(self, ino: InodeNo) -> None:
        promised = self._pool.open_inodes[ino]
        promised.unfinished = True
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

    def _displace(self, ino: InodeNo, record: InodeRecord) -> None:
        """Keep a draft that lost its name: its writer will open it, or rename it."""
        opened = self._pool.open_inodes.enter(ino, writer=False)
        if not opened.writers:
            opened.maker = Maker(record.maker_tgid, record.maker_birth)
            opened.allocated_bytes = record.allocated_bytes
        awaited = self._awaited.get(ino)
        thread = 0 if awaited is None else awaited[2]
        until_s = self._pool.monotonic_s() + _DISPLACED_S
        self._displaced[opened.ino] = Displaced(record.parent, record.name, opened, until_s, thread)
        if len(self._displaced) > _DISPLACED_MAX:
            self._forget_oldest()

    def contended(self, parent: InodeNo, name: bytes) -> bool:
        """Whether a draft that lost this name may still be renamed by its writer."""
        return any(lost.name == name and lost.parent == parent for lost in self._displaced.values())

    def meant(self, parent: InodeNo, name: bytes, ino: InodeNo, who: Maker) -> OpenInode | None:
        """Return the finished draft that process *who* means by *name*, None for *ino* itself.

        That is another one if *ino* is still being written and drafts lost the name to it: the
        process's own first. Raises NotFound when it would publish what another one writes.
        """
        lost = [
            displaced.opened
            for displaced in reversed(self._displaced.values())
            if displaced.name == name and displaced.parent == parent
        ]
        present = self._pool.open_inodes.get(ino)
        if not lost or (ino not in self._awaited and (present is None or not present.unfinished)):
            return None
        finished = [
            opened for opened in lost if not (opened.writers or opened.torn or opened.unfinished)
        ]
        for opened in finished:
            if opened.maker == who:
                return opened
        if present is not None and present.maker == who != NOBODY:
            return None
        if finished:
            return finished[0]
        raise NotFound(f"{name!r} is being written by another process")

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

    def restore(self, opened: OpenInode, new_parent: InodeNo, new_name: bytes) -> InodeNo | None:
        """Publish the displaced draft *opened* as *new_name*; return the inode that lost that.

        The draft's old name stays with the writer that took it. Raises as ``Namespace.rename``.
        """
        pool = self._pool
        record = opened.gone
        assert record is not None, "a displaced draft has no name"
        now_ns, sequence = pool.clock_ns(), pool.next_sequence()
        replaced = pool.index.lookup(new_parent, new_name)
        replaced_record = None if replaced is None else self._namespace.record(replaced)
        if replaced_record is not None:
            refuse_mismatch(record, replaced_record)
        final = record._replace(
            parent=new_parent,
            name=new_name,
            state=State.PUBLISHED,
            maker_tgid=0,
            maker_birth=0,
            allocated_bytes=opened.allocated_bytes,
            ctime_ns=now_ns,
            sequence=sequence,
        )
        counters = counted(pool.counters, final, 1)._replace(sequence=sequence)
        if replaced_record is not None:
            counters = counted(counters, replaced_record, -1)
        parent_record = self._namespace.directory(new_parent)
        with pool.change(counters) as txn:
            if replaced is not None and replaced_record is not None:
                parent_record = self._namespace.replace_in(
                    txn, replaced, replaced_record, parent_record, now_ns
                )
            for key, value in opened.attributes.items():
                txn.put_xattr(opened.ino, key, value)
            self._namespace.enter(txn, opened.ino, final, parent_record)
        opened.gone = None
        self.old.stop_showing(opened)
        pool.space.extra_bytes -= opened.allocated_bytes
        del self._displaced[opened.ino]
        pool.leave(opened, writer=False)
        pool.identities.write(opened.ino, final)
        evictable.note(pool, opened.ino, final)
        if replaced is not None and replaced_record is not None:
            self._namespace.bury(replaced, replaced_record, now_ns)
        return replaced

    def give_way(self) -> None:
        """Forget old versions, and drafts without a name that nobody writes: room is needed."""
        self.old.give_way()
        for ino, displaced in list(self._displaced.items()):
            if not (displaced.opened.writers or displaced.opened.unfinished):
                del self._displaced[ino]
                self._pool.leave(displaced.opened, writer=False)

    def tick(self, now_s: float) -> None:
        """End what has waited too long."""
        self.old.tick()
        while self._refused and next(iter(self._refused.values())).until_s <= now_s:
            self._refused.popitem(last=False)
        while self._awaited and next(iter(self._awaited.values()))[1] <= now_s:
            self._drop_awaited()
        while self._displaced and next(iter(self._displaced.values())).until_s <= now_s:
            self._forget_oldest()

    def close(self) -> None:
        """End everything: the pool stops."""
        self.old.close()
        while self._awaited:
            self._drop_awaited()
        while self._displaced:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, displaced = self._displaced.popitem(last=False)
        self._pool.leave(displaced.opened, writer=False)

    def _drop_awaited(self) -> None:
        """Nobody opened the fresh inode: its name is a draft that nobody writes."""
        ino, (extent, _, _) = self._awaited.popitem(last=False)
        self._pool.space.extra_bytes -= extent.reserve_bytes
        with contextlib.suppress(OSError):  # a reader, or its grave, may keep the extent
            self._pool.extents.trim(extent.fd, 0)
        self._pool.ready.let_go(extent)
        if (record := self._pool.index.inode_or_miss(ino)) is not None:
            try:
                self.unnamed(self._namespace.unlink(record.parent, record.name))
            except (KvfsError, OSError):
                return
        self._pool.unfinished.discard(ino)
