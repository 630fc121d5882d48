"""Drafts that lost their name to another writer, kept until their writer opens or renames them.

Two processes that write the same temporary name (LMCache) each get an inode of their own
(truncating_open.py), and each renames its own.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from kvfs.core.changed import Why
from kvfs.core.errors import NotFound
from kvfs.core.inode_rules import refuse_mismatch
from kvfs.core.lifecycle import State
from kvfs.core.rewriting import DISPLACED
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange
from kvfs.engine.rewrite.old_versions import OldVersions
from kvfs.machine.processes import Maker
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_DISPLACED_NOTE: Final = b"rewrite/displaced"


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

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._kept

    def keep(self, ino: InodeNo, record: InodeRecord, thread: int) -> None:
        """Keep a draft that lost its name, for an OPEN of *thread* (0: none) or its rename."""
        opened = self._pool.open_inodes.enter(ino, writer=False)
        if not opened.writers:
            opened.maker = Maker(record.maker_tgid, record.maker_birth)
            opened.allocated_bytes = record.allocated_bytes
        until_s = self._pool.monotonic_s() + DISPLACED.wait_s
        self._kept[opened.ino] = Displaced(record.parent, record.name, opened, until_s, thread)
        if len(self._kept) > DISPLACED.most:
            self._forget_oldest()
        self._note()

    def _note(self) -> None:
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
            opened = pool.open_notes.enter(pool.open_inodes, pool.space, ino)
            if opened is None:
                continue
            if not opened.writers:
                opened.maker = Maker(*maker)
            self._kept[ino] = Displaced(parent, name, opened, until_s, thread)

    def come_for(self, ino: InodeNo) -> None:
        """Note that the OPEN for which *ino* was kept has come."""
        self._kept[ino] = self._kept[ino]._replace(thread=0)
        self._note()

    def is_promised(self, ino: InodeNo, thread: int) -> bool:
        """Whether *ino* was *thread*'s fresh inode when another writer took the name."""
        displaced = self._kept.get(ino)
        return displaced is not None and displaced.thread == thread > 0

    def promised(self, record: InodeRecord, thread: int) -> InodeNo | None:
        """Return *thread*'s fresh inode if it lost the name between two LOOKUPs of one try."""
        name = (record.parent, record.name)
        lost = (ino for ino, kept in self._kept.items() if (kept.parent, kept.name) == name)
        return next((ino for ino in lost if self.is_promised(ino, thread)), None)

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
        present = self._pool.open_inodes.get(ino)
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
        now_ns, sequence = pool.clock_ns(), pool.next_sequence()
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
        with TreeChange(pool, now_ns, keeps=True) as change:
            if replaced is not None and replaced_record is not None:
                change.unlink(replaced, replaced_record, Why.REPLACED)
            change.link(opened.ino, final, opened.attributes, why=Why.RESTORED)
            change.does(request, opened.ino)
        opened.gone = None
        self.old.stop_showing(opened)
        pool.space.extra_bytes -= opened.allocated_bytes
        del self._kept[opened.ino]
        self._note()
        pool.leave(opened, writer=False)
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
                self._note()
                self._pool.leave(displaced.opened, writer=False)

    def tick(self, now_s: float) -> None:
        """Give up those that have waited too long."""
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            self._forget_oldest()

    def close(self) -> None:
        """Give up all, because the pool stops."""
        while self._kept:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, displaced = self._kept.popitem(last=False)
        self._note()
        self._pool.leave(displaced.opened, writer=False)
