"""Changes of the tree: all records of a name change together in one transaction, or none does.

They are the name's row, the directory's row for it, the inode's record and attributes, the number
of names in its directory, the pool's counters, and what its owner is charged. They are written only
here (tests/engine/test_tree_change.py). Recovery changes an index that no pool has open, and counts
it anew at the end. It uses the functions below that write rows into a bare transaction.

A rename also changes the state of the inode that moves, and what depends on its name: ``renamed``
and ``follow``.

A block may have two names (core/inode_rules.py). Removing either name, or renaming over it, leaves
the block with the other one, as on any file system. The alias also goes alone: when the process
that linked it has ended, or in a power loss.
"""

import contextlib
import stat
from typing import Final, NamedTuple

from kvfs.core.changed import NO_ATTRIBUTES, Attributes, Changed, Reason, Why
from kvfs.core.errors import Damaged, DeadInode, NotADirectory
from kvfs.core.inode_rules import alias_of, block_of, counted, lead_to, with_alias, without_alias
from kvfs.core.lifecycle import UNFINISHED, Event, State, after
from kvfs.core.rewriting import Place, Recent
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord
from kvfs.machine.processes import Maker
from kvfs.pool.open.extent_bytes import measured
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.ports import Room
from kvfs.pool.pool import Pool
from kvfs.pool.pool_change import PoolChange
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import WriteTransaction
from kvfs.storage.syscalls import Syscalls

#: A plain number: it is compared at each change of a name.
_ALIAS: Final = int(State.ALIAS)


def directory_record(index: Index, ino: InodeNo) -> InodeRecord:
    """Return the record of directory *ino*. Raises DeadInode, NotADirectory."""
    record = index.inode(ino)
    if record is None:
        raise DeadInode(f"inode {ino}")
    if not stat.S_ISDIR(record.mode):
        raise NotADirectory(f"inode {ino}")
    return record


def alias_record(index: Index, record: InodeRecord) -> InodeRecord | None:
    """Return the record of the alias of the block with *record*, None if it has none to be read."""
    alias = alias_of(record)
    named = index.inode_or_miss(alias) if alias else None
    return named if named is not None and named.state == _ALIAS else None


def put_rows(txn: WriteTransaction, ino: InodeNo, record: InodeRecord) -> None:
    """Write the rows of *ino* and of the name in *record*, which does not exist yet."""
    txn.put_inode(ino, record)
    txn.put_name(record.parent, record.name, ino)
    if record.state == _ALIAS:
        txn.lead_name(record.parent, record.name, block_of(record))


def drop_rows(txn: WriteTransaction, ino: InodeNo, record: InodeRecord | None) -> Attributes:
    """Remove the rows of *ino*, with a *record* also its name; return the attributes it had."""
    if record is not None:
        txn.delete_name(record.parent, record.name, ino)
    txn.delete_inode(ino)
    return txn.delete_xattrs(ino)


def put_attributes(txn: WriteTransaction, ino: InodeNo, attributes: Attributes) -> None:
    """Give *ino*, which has none, these *attributes*."""
    for name, value in attributes.items():
        txn.put_xattr(ino, name, value)


def replace_attributes(txn: WriteTransaction, ino: InodeNo, attributes: Attributes) -> Attributes:
    """Give *ino* these *attributes* and no others; return those that it had."""
    before = txn.delete_xattrs(ino)
    put_attributes(txn, ino, attributes)
    return before


def put_counts(txn: WriteTransaction, directory: InodeNo, entries: int, subdirs: int) -> None:
    """Write how many names and subdirectories *directory* has, if it is there. Raises Damaged."""
    record = txn.inode(directory)
    if record is not None:
        txn.put_inode(directory, record._replace(entries=entries, subdirs=subdirs))


class Move(NamedTuple):
    """An inode that gets another name: its record with the old one, and with the new one."""

    ino: InodeNo
    before: InodeRecord
    after: InodeRecord


class TreeChange(PoolChange):
    """A ``with`` block around one change of the tree: operations in one transaction.

    Directories and counters are written at the end of the block. Memory is updated after the
    commit, so that a failed commit changes nothing. A directory that one operation adds, moves or
    removes must not be the parent in another one.
    """

    __slots__ = ("_directories", "_gone", "_keeps", "_left", "_now_ns", "_tree")

    def __init__(
        self,
        pool: Pool,
        now_ns: int,
        *,
        begun: InodeNo = NO_INODE,
        finished: InodeNo = NO_INODE,
        lasting: bool = True,
        keeps: bool = False,
    ) -> None:
        """Directories are changed at *now_ns*; *begun* to *lasting* as in ``Pool.change``.

        *keeps*: an inode that loses its name may still be opened (``Namespace.keep_removed``).
        """
        super().__init__(pool, pool.counters, begun, finished, lasting=lasting)
        self._tree = pool
        self._now_ns = now_ns
        self._keeps = keeps
        self._directories: dict[InodeNo, InodeRecord] = {}
        self._gone: list[tuple[InodeNo, InodeRecord, Attributes]] = []
        #: The attributes of inodes that lost their name and are, or may be, open.
        self._left: dict[InodeNo, Attributes] = {}

    def link(
        self,
        ino: InodeNo,
        record: InodeRecord,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        why: Why = Why.CREATED,
    ) -> None:
        """Enter *ino*, which had no name so far, under the name in *record*, which is free.

        Raises DeadInode, NotADirectory.
        """
        self._count(record, 1)
        self._enter(ino, record, attributes, why)

    def unlink(
        self, ino: InodeNo, record: InodeRecord, why: Why, *, reason: Reason = Reason.SPACE
    ) -> None:
        """Remove *ino* and its name, and its alias. Raises DeadInode, NotADirectory.

        *reason*: why it is evicted, if *why* is EVICTED.
        """
        self._count(record, -1)
        self._drop(Changed(ino, record, None, why, reason=reason))

    def replace(
        self,
        ino: InodeNo,
        record: InodeRecord,
        new: InodeNo,
        new_record: InodeRecord,
        attributes: Attributes,
        why: Why = Why.CREATED,
    ) -> None:
        """Let the name of *ino*, and its alias, lead to inode *new*; directories do not change.

        *why* there is a new one: MOVED if it has the same bytes.
        """
        alias, named = alias_of(record), alias_record(self._tree.index, record)
        if named is not None:  # it leaves the old inode, and so it is not dropped
            record, new_record = without_alias(record), with_alias(new_record, alias)
        self._drop(Changed(ino, record, None, Why.REPLACED, heir=new))
        self._enter(new, new_record, attributes, why)
        if why is Why.MOVED:  # who follows knows the heir when its predecessor goes
            self._changes[-2:] = reversed(self._changes[-2:])
        if named is not None:
            put_rows(self.txn, alias, moved := lead_to(named, new))
            self._changes.append(Changed(alias, named, moved, Why.LINKED))

    def drop_alias(self, record: InodeRecord, *, why: Why = Why.LINKED) -> InodeRecord | None:
        """Remove the alias of the block with *record*, if it has one; return the alias's record.

        The caller writes the block's record anew. Raises DeadInode, NotADirectory.
        """
        named = alias_record(self._tree.index, record)
        if named is not None:
            alias = alias_of(record)
            self._count(named, -1)
            self._counters = counted(self._counters, named, -1)
            drop_rows(self.txn, alias, named)
            self._changes.append(Changed(alias, named, None, why))
        return named

    def part(self, ino: InodeNo, record: InodeRecord, parent: InodeNo, name: bytes) -> Move | None:
        """Take *name* from block *ino*, which has two.

        Return the move by which it keeps the name of its alias; None: it keeps its own. Raises
        DeadInode, NotADirectory.
        """
        alias = self.drop_alias(record, why=Why.REMOVED)
        left = without_alias(record)._replace(ctime_ns=self._now_ns)
        if alias is None or (record.parent, record.name) != (parent, name):
            self.write(Changed(ino, record, left, Why.LINKED))
            return None
        left = left._replace(
            parent=alias.parent, name=alias.name, sequence=self._tree.counters.next_sequence
        )
        self.move(move := Move(ino, record, left))
        return move

    def move(self, *moves: Move, why: Why = Why.RENAMED) -> None:
        """Give each inode its new name, which is free or belongs to another of these *moves*.

        Raises DeadInode, NotADirectory.
        """
        for ino, before, moved in moves:
            stays = before.parent == moved.parent
            self._count(before, 0 if stays else -1)
            if not stays:
                self._count(moved, 1)
            self.txn.delete_name(before.parent, before.name, ino)
        for ino, before, moved in moves:
            growth_bytes = moved.allocated_bytes - before.allocated_bytes
            if growth_bytes:  # bytes written since the index was logged (recovery)
                used_bytes = self._counters.used_bytes + growth_bytes
                self._counters = self._counters._replace(used_bytes=used_bytes)
            put_rows(self.txn, ino, moved)
            # A file says so (recovery), since a rename does not change the owner.
            theirs = self._attributes(ino) if before.uid != moved.uid else NO_ATTRIBUTES
            self._changes.append(Changed(ino, before, moved, why, theirs, theirs))
            if moved.sequence > self._counters.sequence:
                self._counters = self._counters._replace(sequence=moved.sequence)

    def take_attributes(self, ino: InodeNo, record: InodeRecord, attributes: Attributes) -> None:
        """Give *ino*, whose final record is *record*, its file's *attributes* and no others."""
        before = replace_attributes(self.txn, ino, attributes)
        self._changes.append(Changed(ino, record, record, Why.RECONCILED, before, attributes))

    def _attributes(self, ino: InodeNo) -> Attributes:
        """Return the attributes that *ino* had before this change; unreadable ones are empty."""
        index = self._tree.index
        found: dict[bytes, bytes] = {}
        for name in index.xattrs(ino):
            with contextlib.suppress(Damaged):
                found[name] = index.xattr(ino, name) or b""
        return found

    def _count(self, record: InodeRecord, step: int) -> None:
        """Count one name more (*step* 1) or less (-1) in the directory of *record*."""
        ino = record.parent
        found = self._directories.get(ino) or directory_record(self._tree.index, ino)
        self._directories[ino] = found._replace(
            entries=found.entries + step,
            subdirs=found.subdirs + step * stat.S_ISDIR(record.mode),
            mtime_ns=self._now_ns,
            ctime_ns=self._now_ns,
        )

    def _enter(self, ino: InodeNo, record: InodeRecord, attributes: Attributes, why: Why) -> None:
        put_rows(self.txn, ino, record)
        self._counters = counted(self._counters, record, 1)
        if record.sequence > self._counters.sequence:
            self._counters = self._counters._replace(sequence=record.sequence)
        if attributes:
            put_attributes(self.txn, ino, attributes)
        self._changes.append(Changed(ino, None, record, why, gained=attributes))

    def _drop(self, gone: Changed) -> None:
        assert gone.before is not None, "it has a name"
        if gone.before.target:
            self.drop_alias(gone.before)
        attributes = drop_rows(self.txn, gone.ino, gone.before)
        self._counters = counted(self._counters, gone.before, -1)
        self._gone.append((gone.ino, gone.before, attributes))
        self._changes.append(gone._replace(lost=attributes))

    def _complete(self) -> None:
        for ino, record in self._directories.items():
            self.txn.put_inode(ino, record)
        for ino, record, attributes in self._gone:
            if self._keeps or ino in self._tree.open.inodes:  # before the index forgets it
                gone = record._replace(ctime_ns=self._now_ns)
                self._left[ino] = self._tree.open.notes.lose_name(ino, gone, attributes)
        super()._complete()

    def _learn(self) -> None:
        """Update memory. A removed inode that is open keeps its attributes there."""
        super()._learn()
        for ino, attributes in self._left.items():
            if (opened := self._tree.open.inodes.get(ino)) is not None:
                opened.keep_attributes(attributes)


def _publishes(opened: OpenInode | None, record: InodeRecord, who: Maker | None) -> bool:
    """Whether a rename by *who* publishes *record* at once, and not at its last close."""
    if not stat.S_ISREG(record.mode):
        return False
    if opened is None or not opened.writers:
        # A draft without a writer waits for its OPEN (truncating_open.py) and has no bytes yet.
        return record.state not in UNFINISHED
    own = record.state in UNFINISHED and (who is None or who == opened.maker)
    return own and not opened.torn


def renamed(
    syscalls: Syscalls, opened: OpenInode | None, record: InodeRecord, who: Maker | None
) -> InodeRecord:
    """Return *record* as a rename by *who* to another name leaves it: a block is published."""
    if not _publishes(opened, record, who):
        return record
    state = after(State(record.state), Event.RENAME)
    if opened is not None and opened.writers and opened.fd >= 0:
        # It was renamed before its close (llm-d), or the RELEASE comes after the RENAME.
        now = measured(syscalls, opened, record)
        record = now._replace(allocated_bytes=record.allocated_bytes)
    return record._replace(state=state, maker_tgid=0, maker_birth=0)


def follow(pool: Pool, room: Room, former_names: Recent[InodeNo, Place], move: Move) -> None:
    """Apply the new directory's policies (who sees drafts, ranks) after *move* was committed."""
    ino, before, record = move
    former_names.remember(ino, (before.parent, before.name), pool.monotonic_s())
    is_directory = stat.S_ISDIR(record.mode)
    if not is_directory and record.state not in UNFINISHED:
        return
    policies, above, now_above = pool.rules.policies, before.parent, record.parent
    if pool.settings.policies or policies.hide_drafts(above) != policies.hide_drafts(now_above):
        show_drafts_anew(pool)
    left, inherited = policies.of(above), policies.of(now_above)
    ranks_differ = (left.evict, left.pin) != (inherited.evict, inherited.pin)
    if is_directory and (pool.settings.policies or ranks_differ or pool.figures.held.outdated):
        room.rank_anew()


def show_drafts_anew(pool: Pool) -> None:
    """Drop draft names from the kernel's cache, because it changed who may see them."""
    for ino in pool.open.inodes.written:
        record = pool.index.inode_or_miss(ino)
        if record is not None and record.state in UNFINISHED:
            pool.kernel.name_vanished(record.parent, record.name)


def bearer(
    index: Index, parent: InodeNo, name: bytes, ino: InodeNo, record: InodeRecord
) -> tuple[InodeNo, InodeRecord]:
    """Return the inode whose record has *name*, which leads to *ino*: this one, or its alias."""
    if (record.parent, record.name) == (parent, name):
        return ino, record
    named = alias_record(index, record)
    return (ino, record) if named is None else (alias_of(record), named)


def has_two(index: Index, record: InodeRecord) -> bool:
    """Whether the block with *record* has an alias; not if the alias's record cannot be read."""
    return alias_record(index, record) is not None


def end_alias(pool: Pool, alias: InodeNo, record: InodeRecord) -> None:
    """Remove *alias*, and leave its block with one name. Raises NoSpace, OSError."""
    ino = block_of(record)
    block = pool.index.inode_or_miss(ino)
    with TreeChange(pool, pool.clock_ns()) as change:
        if block is not None and alias_of(block) == alias:
            change.drop_alias(block)
            change.write(Changed(ino, block, without_alias(block), Why.LINKED))
        else:
            change.unlink(alias, record, Why.LINKED)


def one_name(
    pool: Pool, ino: InodeNo, record: InodeRecord | None, below: InodeNo
) -> InodeRecord | None:
    """Return *record* of inode *ino* as it is without a second name from before a power loss.

    None if it is such a name itself. An alias has a serial number below *below* then, and is
    dropped: it has no file that would confirm it. Raises NoSpace, OSError.
    """
    if record is None:
        return None
    is_alias = record.state == State.ALIAS
    alias = ino if is_alias else alias_of(record)
    if not alias or pool.numbers.serial(alias) >= below:
        return record
    named = record if is_alias else alias_record(pool.index, record)
    if named is None:
        return record
    end_alias(pool, alias, named)
    return pool.index.inode_or_miss(ino)
