"""What a name leads to while it is written: for its writer, for another writer, for all others.

O_TRUNC gives a final block's name to a fresh draft (truncating_open.py). Other processes that look
the name up meanwhile are led to the old block, so that readers never see a version grow. The index
does not record this. If the server is killed or the writer dies, both versions are lost: the name
is a miss.

Two processes that write the same temporary name (LMCache) each get an inode of their own, and each
renames its own. A draft that lost its name is kept until its writer opens or renames it.

A draft is seen by everybody, or only by its writer if the policy of its directory says so.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from kvfs.core.changed import Why
from kvfs.core.errors import NotFound
from kvfs.core.inode_rules import refuse_mismatch
from kvfs.core.lifecycle import HIDEABLE, UNFINISHED, State, is_temporary
from kvfs.core.rewriting import CONTENDED, DISPLACED, Place, Recent
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange, has_two
from kvfs.machine.processes import NOBODY, SERVER, Maker
from kvfs.pool.departures import Departures
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.pool.pool import Pool
from kvfs.pool.pool_parts import OpenParts, SpaceParts
from kvfs.pool.rules.policies import Policies
from kvfs.storage.index import Index
from kvfs.storage.outliving import Notes

_OLD_NOTE: Final = b"rewrite/old"
_DISPLACED_NOTE: Final = b"rewrite/displaced"


class OldVersions:
    """Blocks without a name, shown in place of the drafts that took it."""

    def __init__(
        self,
        index: Index,
        space: SpaceParts,
        opened: OpenParts,
        notes: Notes,
        departures: Departures,
    ) -> None:
        self._index, self._space, self._open = index, space, opened
        self._notes, self._departures = notes, departures
        #: Old blocks by draft; None if the space was needed: then the name is a miss for others.
        self._kept: dict[InodeNo, OpenInode | None] = {}

    def __contains__(self, draft: InodeNo) -> bool:
        return draft in self._kept

    def keep(self, ino: InodeNo, draft: InodeNo, *, stands_in: bool) -> None:
        """Show an old version for *draft*, which takes the name of *ino*.

        It is what was shown for *ino* so far, or *ino* itself if it *stands_in*. Call it before
        ``Namespace.keep_removed`` of *ino*.
        """
        kept: OpenInode | None = None
        if ino in self._kept:
            kept = self._kept.pop(ino)
        elif stands_in:
            kept = self._open.inodes.enter(ino, writer=False)
        else:
            return
        self._kept[draft] = kept
        if kept is not None:
            kept.stand_in(draft)
        self._write_note()

    def keep_nothing(self, draft: InodeNo) -> None:
        """Note that the block replaced by *draft* is gone: others miss until the draft is whole."""
        self._kept[draft] = None
        self._write_note()

    def _write_note(self) -> None:
        """Note all of them, for a server that takes the mount over."""
        rows = [(draft, 0 if kept is None else kept.ino) for draft, kept in self._kept.items()]
        self._notes.put(_OLD_NOTE, rows)

    def recall(self) -> None:
        """Show the noted old versions again. Without one, the draft is a miss until it is whole."""
        rows = self._notes.get(_OLD_NOTE) or []
        for draft, ino in rows:
            if not self._index.knows(draft):
                continue
            kept = None
            if ino and not self._index.knows(ino):
                kept = self._open.notes.enter(self._open.inodes, self._space.of(ino), ino)
            if kept is not None:
                kept.stand_in(draft)
            self._kept[draft] = kept

    def of(self, draft: InodeNo) -> InodeNo | None:
        """Return the inode that others see in place of *draft*, None if they see nothing."""
        kept = self._kept[draft]
        return None if kept is None else kept.ino

    def stop_showing(self, opened: OpenInode) -> None:
        """Note that *opened* has a name again: its draft is a miss for others until it is whole."""
        if opened.stands_in:
            self._kept[opened.stands_in] = None
            self._write_note()
            self._let_go(opened)

    def _let_go(self, opened: OpenInode) -> None:
        opened.stand_in(NO_INODE)
        self._departures.leave(opened, writer=False)

    def end(self, draft: InodeNo) -> None:
        """Show *draft* itself from now on, because it is whole or has lost its name.

        Nothing happens if it is shown already.
        """
        if draft not in self._kept:
            return
        kept = self._kept.pop(draft)
        self._write_note()
        if kept is not None:
            self._let_go(kept)

    def may_go(self) -> list[OpenInode]:
        """Return what ``give_way`` lets go."""
        return [kept for kept in self._kept.values() if kept is not None]

    def give_way(self) -> None:
        """Give up the old blocks, because their space is needed."""
        for draft, kept in list(self._kept.items()):
            self._kept[draft] = None
            self._write_note()
            if kept is not None:
                self._let_go(kept)

    def run_due(self) -> None:
        """End old versions whose draft was renamed or removed before its last close."""
        for draft in list(self._kept):
            record = self._index.inode_or_miss(draft)
            if record is None or record.state not in UNFINISHED:
                self.end(draft)

    def close(self) -> None:
        """Give up all, because the pool stops."""
        for draft in list(self._kept):
            self.end(draft)


class Displaced(NamedTuple):
    """A draft whose name another writer took; it is forgotten at *until_s*."""

    parent: InodeNo
    name: bytes
    opened: OpenInode
    until_s: float
    #: The thread whose OPEN is still to come; 0 if it was opened.
    thread: int


class DisplacedDrafts:
    """The displaced drafts of one pool, oldest first; they are few, so a search is quick."""

    def __init__(self, pool: Pool, old: OldVersions) -> None:
        self._pool = pool
        self.old = old
        self._kept: OrderedDict[InodeNo, Displaced] = OrderedDict()
        #: Names that several writers had, or took from each other, a moment ago.
        self._fought_over: Recent[Place, bool] = Recent(CONTENDED)

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._kept

    def keep(self, ino: InodeNo, record: InodeRecord, thread: int) -> None:
        """Keep a draft that lost its name, for an OPEN of *thread* (0: none) or its rename."""
        opened = self._pool.open.inodes.enter(ino, writer=False)
        if not opened.writers:
            opened.belong_to(Maker(record.maker_tgid, record.maker_birth))
            opened.hold(record.allocated_bytes)
        until_s = self._pool.monotonic_s() + DISPLACED.wait_s
        self._kept[opened.ino] = Displaced(record.parent, record.name, opened, until_s, thread)
        if len(self._kept) > DISPLACED.most:
            self._forget_oldest()
        self._write_note()

    def _write_note(self) -> None:
        """Note all of them, for a server that takes the mount over."""
        rows = [
            (ino, lost.parent, lost.name, tuple(lost.opened.maker), lost.until_s, lost.thread)
            for ino, lost in self._kept.items()
        ]
        self._pool.notes.put(_DISPLACED_NOTE, rows)

    def recall(self) -> None:
        """Keep again what was noted and is not lost. Its other handles are counted already."""
        rows = self._pool.notes.get(_DISPLACED_NOTE) or []
        for ino, parent, name, maker, until_s, thread in rows:
            pool = self._pool
            if pool.index.knows(ino):
                continue
            opened = pool.open.notes.enter(pool.open.inodes, pool.space.of(ino), ino)
            if opened is None:
                continue
            if not opened.writers:
                opened.belong_to(Maker(*maker))
            self._kept[ino] = Displaced(parent, name, opened, until_s, thread)

    def come_for(self, ino: InodeNo) -> None:
        """Note that the OPEN for which *ino* was kept has come."""
        self._kept[ino] = self._kept[ino]._replace(thread=0)
        self._write_note()

    def is_promised(self, ino: InodeNo, thread: int) -> bool:
        """Whether *ino* was *thread*'s fresh inode when another writer took the name."""
        displaced = self._kept.get(ino)
        return displaced is not None and displaced.thread == thread > 0

    def promised(self, record: InodeRecord, thread: int) -> InodeNo | None:
        """Return *thread*'s fresh inode if it lost the name between two LOOKUPs of one try."""
        name = (record.parent, record.name)
        lost = (ino for ino, kept in self._kept.items() if (kept.parent, kept.name) == name)
        return next((ino for ino in lost if self.is_promised(ino, thread)), None)

    def note_fight(self, record: InodeRecord) -> None:
        """Note that several writers have the name of *record*, or that one took it from another."""
        self._fought_over.remember((record.parent, record.name), True, self._pool.monotonic_s())

    def fought_over(self, parent: InodeNo, name: bytes) -> bool:
        """Whether writers took this name from each other a moment ago."""
        return self._fought_over.of((parent, name), self._pool.monotonic_s()) is not None

    def contended(self, parent: InodeNo, name: bytes) -> bool:
        """Whether a draft that lost this name may still be renamed by its writer."""
        if not self._kept:  # quickly, since each rename asks twice
            return False
        return any(lost.name == name and lost.parent == parent for lost in self._kept.values())

    def meant(
        self, parent: InodeNo, name: bytes, ino: InodeNo, who: Maker, *, awaited: bool
    ) -> OpenInode | None:
        """Return the finished draft that process *who* means by *name*, None for *ino* itself.

        *ino* has the name now. If it is still being written, a draft that lost the name to it is
        meant, first of all one of *who*. *awaited*: the OPEN of *ino* is still to come. Raises
        NotFound if *who* would publish what another process is writing.
        """
        lost = [
            displaced.opened
            for displaced in reversed(self._kept.values())
            if displaced.name == name and displaced.parent == parent
        ]
        present = self._pool.open.inodes.get(ino)
        if not lost or not (awaited or (present is not None and present.unfinished)):
            return None
        finished = [
            opened for opened in lost if not (opened.writers or opened.torn or opened.unfinished)
        ]
        for opened in finished:
            if opened.maker == who:
                return opened
        if present is not None and present.maker == who and who.is_one:
            return None
        if finished:
            return finished[0]
        raise NotFound(f"{name!r} is being written by another process")

    def restore(
        self,
        namespace: Namespace,
        opened: OpenInode,
        new_parent: InodeNo,
        new_name: bytes,
        *,
        request: int = 0,
    ) -> InodeNo | None:
        """Publish the displaced draft *opened* as *new_name*; return the inode that lost it.

        The draft's old name stays with the writer that took it. Raises as ``Namespace.rename``.
        """
        pool = self._pool
        record = opened.gone
        assert record is not None, "a displaced draft has no name"
        now_ns, sequence = pool.clock_ns(), pool.counters.next_sequence
        replaced = pool.index.lookup(new_parent, new_name)
        replaced_record = None if replaced is None else namespace.record(replaced)
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
        parts = replaced_record is not None and has_two(pool.index, replaced_record)
        kept = None
        with TreeChange(pool, now_ns, keeps=True) as change:
            if replaced is not None and replaced_record is not None:
                if parts:
                    kept = change.part(replaced, replaced_record, new_parent, new_name)
                else:
                    change.unlink(replaced, replaced_record, Why.REPLACED)
            change.link(opened.ino, final, opened.attributes, why=Why.RESTORED)
            change.does(request, opened.ino)
        opened.regain_name()
        self.old.stop_showing(opened)
        pool.space.of(opened.ino).extra_bytes -= opened.allocated_bytes
        del self._kept[opened.ino]
        self._write_note()
        pool.departures.leave(opened, writer=False)
        if parts:
            namespace.moved(kept)
            return None
        if replaced is not None and replaced_record is not None:
            namespace.keep_removed(replaced, replaced_record, now_ns)
        return replaced

    def may_go(self) -> list[OpenInode]:
        """Return what ``give_way`` lets go."""
        drafts = (lost.opened for lost in self._kept.values())
        return [opened for opened in drafts if not (opened.writers or opened.unfinished)]

    def give_way(self) -> None:
        """Give up those without a writer, because space is needed."""
        for ino, displaced in list(self._kept.items()):
            if not (displaced.opened.writers or displaced.opened.unfinished):
                del self._kept[ino]
                self._write_note()
                self._pool.departures.leave(displaced.opened, writer=False)

    def run_due(self, now_s: float) -> None:
        """Give up those that have waited too long."""
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            self._forget_oldest()

    def close(self) -> None:
        """Give up all, because the pool stops."""
        while self._kept:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, displaced = self._kept.popitem(last=False)
        self._write_note()
        self._pool.departures.leave(displaced.opened, writer=False)


class Visibility:
    """Decides who sees the drafts of one pool.

    While a block is rewritten with O_TRUNC, everybody but its writer sees the old version, or
    nothing if a file server emptied it.
    """

    def __init__(self, inodes: OpenInodes, policies: Policies, old: OldVersions) -> None:
        self._inodes = inodes
        self._policies = policies
        self._old = old

    def seen(self, ino: InodeNo, record: InodeRecord, who: Maker) -> InodeNo | None:
        """Return the inode that *who* sees under the name of *record*, None if it sees none."""
        if record.state in HIDEABLE:
            if ino in self._old and not self._is_maker(who, ino, record):
                return self._old.of(ino)
            if self._is_emptied(ino):
                return ino if who == SERVER else None
            if self.hidden(ino, record, who):
                return None
        return ino

    def known_from_before(self, ino: InodeNo) -> bool:
        """Whether a file server emptied *ino*, and only file servers have it open.

        The kernel was told to forget its name, but another program may still reach it.
        """
        opened = self._inodes.get(ino)
        if opened is None or not opened.emptied:
            return False
        served = opened.served_readers + opened.served_writers
        return opened.readers + opened.writers == served

    def _is_emptied(self, ino: InodeNo) -> bool:
        opened = self._inodes.get(ino)
        return opened is not None and opened.emptied

    def hidden(self, ino: InodeNo, record: InodeRecord, who: Maker) -> bool:
        """Whether process *who* must not see *record* under its name."""
        if record.state not in HIDEABLE:
            return False
        if not self.is_private(record) or self._is_maker(who, ino, record):
            return False
        opened = self._inodes.get(ino)
        if opened is None or not opened.awaits_rename:
            return True
        return self._policies.of(record.parent).only_renamed  # else it is whole: all see it

    def _is_maker(self, who: Maker, ino: InodeNo, record: InodeRecord) -> bool:
        """Whether *who* writes *ino*, or may be its writer.

        Processes that cannot be watched cannot be told apart. Under a temporary name any of them
        may be the writer, which must find the file to rename it. A file server, too, looks up what
        it has just made (FSAL VFS does at each CREATE), and its clients cannot be told apart.
        """
        opened = self._inodes.get(ino)
        if opened is not None and opened.met and who.is_one:
            return any(hand.maker == who for hand in opened.hands)
        maker = self._maker(ino, record)
        return who == maker and (who != NOBODY or is_temporary(record.name))

    def is_private(self, record: InodeRecord) -> bool:
        """Whether only its maker may see the draft *record*, by its state or its directory."""
        if record.state == State.UNRENAMED:
            return True
        return self._policies.hide_drafts(record.parent)

    def trusts_name(self, record: InodeRecord, *, just_created: bool) -> bool:
        """Whether the kernel may cache the name; a draft's name can be taken by another writer.

        After the maker's own CREATE it may: a writer that takes the name does a LOOKUP first.
        """
        if record.state not in HIDEABLE:
            return True
        return just_created and not self.is_private(record)

    def _maker(self, ino: InodeNo, record: InodeRecord) -> Maker:
        opened = self._inodes.get(ino)
        if opened is not None and opened.writers:
            return opened.maker
        return Maker(record.maker_tgid, record.maker_birth)
