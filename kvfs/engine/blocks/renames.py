"""Gives a block another name: rename(2), and link(2), which leaves the first name as an alias.

A rename moves a name as it is, or publishes a finished draft that lost that name and now gets it.

Some programs publish by a link, because that replaces nothing. Like a rename, it makes a whole
block visible under its name in one transaction, or not at all. Links to what is published are
refused. A draft without a name (O_TMPFILE) gets its first one so.
"""

import stat
from typing import Final, NamedTuple

from kvfs.core.changed import Why
from kvfs.core.errors import NotFound, NotPermitted, TooManyLinks
from kvfs.core.inode_rules import alias_of, may_be_linked, new_alias, with_alias
from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord
from kvfs.engine.blocks.closes import LastCloses
from kvfs.engine.blocks.served import Served
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import Move, TreeChange, renamed
from kvfs.engine.rewrite.truncating_open import TruncatingOpens
from kvfs.machine.processes import NOBODY, SERVER, Maker
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_ROOT_UID: Final = 0


class _New(NamedTuple):
    """The name that a block gets, and the inode of the alias that it leaves behind."""

    alias: InodeNo
    parent: InodeNo
    name: bytes


class Renames:
    """Moves the names of one pool, and links its blocks."""

    def __init__(
        self,
        pool: Pool,
        namespace: Namespace,
        truncating: TruncatingOpens,
        closes: LastCloses,
        served: Served,
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._truncating = truncating
        self._closes = closes
        self._served = served

    def rename(
        self,
        parent: InodeNo,
        name: bytes,
        new_parent: InodeNo,
        new_name: bytes,
        *,
        replace: bool,
        who: Maker = NOBODY,
        request: int = 0,
    ) -> InodeNo | None:
        """Move a name (``Namespace.rename``), or publish the finished draft that lost that name.

        *who* is the calling process, *request* its request's number. Returns the inode that lost
        its name.
        """
        truncating, closes = self._truncating, self._closes
        renames = (parent, name) != (new_parent, new_name)
        if replace and renames and truncating.displaced.contended(parent, name):
            closes.settle()
            ino = self._namespace.lookup(parent, name)
            awaited = truncating.is_awaited(ino)
            finished = truncating.displaced.meant(parent, name, ino, who, awaited=awaited)
            if finished is not None:
                replaced = truncating.displaced.restore(
                    self._namespace, finished, new_parent, new_name, request=request
                )
                for changed in ((parent, name), (new_parent, new_name)):
                    self._pool.kernel.name_vanished(*changed)
                return replaced
        if renames and truncating.displaced.fought_over(parent, name):
            closes.settle()
            truncating.refuse_unfinished(self._namespace.lookup(parent, name), who)
        if who == SERVER and renames:
            closes.settle()
            self._served.renames(self._namespace.lookup(parent, name))
        replaced = self._namespace.rename(
            *(parent, name, new_parent, new_name),
            replace=replace,
            who=who,
            request=request,
            closes=closes,
        )
        if who == SERVER:
            self._served.renamed(self._namespace.lookup(new_parent, new_name))
        return replaced

    # ---- link(2) ----

    def link(
        self,
        ino: InodeNo,
        parent: InodeNo,
        name: bytes,
        *,
        who: Maker = NOBODY,
        uid: int = _ROOT_UID,
        request: int = 0,
    ) -> None:
        """Give block *ino* the *name* in *parent*; its present name becomes its alias.

        A draft that was made without a name (O_TMPFILE) has no alias. *who* is the calling process,
        of user *uid*; *request* the number of its request. Raises NotPermitted if *who* may not
        rename it, or anybody may see it as published, TooManyLinks, NotFound if it has lost its
        name, Exists, NameTooLong, NotADirectory, DeadInode, NoSpace, ReadOnly.
        """
        namespace = self._namespace
        namespace.require_free(parent, name)
        record = self._linkable(ino, who, uid)
        if who == SERVER or self._truncating.displaced.fought_over(record.parent, record.name):
            self._closes.settle()
            self._truncating.refuse_unfinished(ino, who)
            if who == SERVER:
                self._served.renames(ino)
        opened = self._pool.open.inodes.get(ino)
        if opened is not None and opened.gone is not None:
            self._give_name(opened, record, _New(NO_INODE, parent, name), who, request)
            return
        alias = namespace.new_number()
        record = self._linkable(ino, who, uid)  # again, as blocks may have been evicted for it
        self._move(ino, record, _New(alias, parent, name), who, request)
        if who == SERVER:
            self._served.renamed(ino)

    def _linkable(self, ino: InodeNo, who: Maker, uid: int) -> InodeRecord:
        """Return the record of *ino* if *who* may link it. Raises as ``link``."""
        record, opened = self._namespace.record(ino), self._pool.open.inodes.get(ino)
        if opened is not None and opened.gone is not None and not self._is_nameless(opened, record):
            raise NotFound(f"inode {ino} has lost its name")
        if alias_of(record):
            raise TooManyLinks(f"inode {ino} has two names")
        owns = self._is_own(Maker(record.maker_tgid, record.maker_birth), record, who, uid)
        if not stat.S_ISREG(record.mode) or not may_be_linked(
            record, writes=self._writes(opened, record, who, uid), owns=owns
        ):
            raise NotPermitted("links to what others may use under its name")
        return record

    def _is_nameless(self, opened: OpenInode, record: InodeRecord) -> bool:
        """Whether *opened* is a draft made without a name, as far as it can be told.

        The kernel refuses to link other files without a name (vfs_link() in fs/namei.c), but for
        those that it does not know to have lost theirs.
        """
        lost = opened.ino in self._truncating.displaced or opened.stands_in or opened.revoked
        return record.state in UNFINISHED and not lost

    def _writes(self, opened: OpenInode | None, record: InodeRecord, who: Maker, uid: int) -> bool:
        """Whether *who* writes *opened*, or has closed it a moment ago, and all is well so far."""
        if opened is None or not opened.writers or opened.torn:
            return False
        return self._is_own(opened.maker, record, who, uid)

    def _is_own(self, maker: Maker, record: InodeRecord, who: Maker, uid: int) -> bool:
        """Whether *who* is *maker*, who made the block with *record*.

        Processes that cannot be told apart, such as clients of a file server, are by their user.
        """
        return maker == who and (who.is_one or uid in (_ROOT_UID, record.uid))

    def _move(self, ino: InodeNo, record: InodeRecord, new: _New, who: Maker, request: int) -> None:
        """Give block *ino* its *new* name. Raises NotADirectory, DeadInode, NoSpace, OSError."""
        pool = self._pool
        now_ns, sequence = pool.clock_ns(), pool.counters.next_sequence
        opened, closed = pool.open.inodes.get(ino), None
        if opened is not None and opened.writers:
            closed = self._closes.closed(opened, record)
        moved = with_alias(
            closed or renamed(pool.syscalls, opened, record, who), new.alias
        )._replace(parent=new.parent, name=new.name, ctime_ns=now_ns, sequence=sequence)
        named = new_alias(ino, record, now_ns, sequence, who)
        why, finished = (Why.RENAMED, NO_INODE) if closed is None else (Why.STORED, ino)
        # Atomic: no checkpoint from here until the name is visible.
        with TreeChange(pool, now_ns, finished=finished) as change:
            change.move(move := Move(ino, record, moved), why=why)
            change.link(new.alias, named, why=Why.LINKED)
            change.does(request, ino)
        if closed is not None and opened is not None:
            self._closes.published(opened, moved.allocated_bytes - record.allocated_bytes)
        elif opened is not None and opened.writers:
            opened.move()
            pool.open.notes.writing(opened)
        self._namespace.moved(move)

    def _give_name(
        self, opened: OpenInode, record: InodeRecord, new: _New, who: Maker, request: int
    ) -> None:
        """Give *opened*, a draft without a name, a *new* one. Raises as ``_move``."""
        pool = self._pool
        now_ns, sequence = pool.clock_ns(), pool.counters.next_sequence
        named = renamed(pool.syscalls, opened, record, who)._replace(
            parent=new.parent, name=new.name, ctime_ns=now_ns, sequence=sequence
        )
        # Atomic: no checkpoint from here until the name is visible.
        with TreeChange(pool, now_ns, begun=opened.ino) as change:
            change.link(opened.ino, named, opened.attributes)
            change.does(request, opened.ino)
        opened.regain_name()
        pool.space.of(opened.ino).extra_bytes -= record.allocated_bytes
        pool.open.notes.end(opened.ino)
        opened.move()
        pool.open.notes.writing(opened)
