"""Changes of the tree: all records of a name change together in one transaction, or none does.

They are the name's row, the directory's row for it, the inode's record and attributes, the number
of names in its directory, the pool's counters, and what its owner is charged. They are written only
here (tests/engine/test_tree_change.py). Recovery changes an index that no pool has open, and counts
it anew at the end. It shares the functions that write rows into a bare transaction.

The tables in memory follow each change here, whoever makes it: leases, pins, ranks, shares, and
the policies that are cached by directory.
"""

import contextlib
import stat
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.core.directory_policy import PIN
from kvfs.core.errors import Damaged, DeadInode, NotADirectory
from kvfs.core.inode_rules import counted
from kvfs.core.lifecycle import SETTLED, UNFINISHED, State
from kvfs.core.node_bound import attributes_bytes
from kvfs.core.types import NO_INODE, InodeNo, InodeRecord
from kvfs.pool import ranks
from kvfs.pool.found_blocks import enter_lease, enter_rank
from kvfs.pool.pool import Pool
from kvfs.pool.pool_change import PoolChange
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import WriteTransaction

Attributes = Mapping[bytes, bytes]
_NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})


def directory_record(index: Index, ino: InodeNo) -> InodeRecord:
    """Return the record of directory *ino*. Raises DeadInode, NotADirectory."""
    record = index.inode(ino)
    if record is None:
        raise DeadInode(f"inode {ino}")
    if not stat.S_ISDIR(record.mode):
        raise NotADirectory(f"inode {ino}")
    return record


def put_rows(txn: WriteTransaction, ino: InodeNo, record: InodeRecord) -> None:
    """Write the rows of *ino* and of the name in *record*, which does not exist yet."""
    txn.put_inode(ino, record)
    txn.put_name(record.parent, record.name, ino)


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
    commit, so that a failed commit changes nothing. No operation may name a directory of another.
    """

    __slots__ = (
        "_come",
        "_directories",
        "_evicts",
        "_found",
        "_gone",
        "_handed",
        "_keeps",
        "_left",
        "_moved",
        "_now_ns",
        "_replaced",
        "_taken",
        "_tree",
    )

    def __init__(
        self,
        pool: Pool,
        now_ns: int,
        *,
        begun: InodeNo = NO_INODE,
        lasting: bool = True,
        keeps: bool = False,
        evicts: bool = False,
        found: bool = False,
    ) -> None:
        """Directories are changed at *now_ns*; *begun* and *lasting* as in ``Pool.change``.

        *keeps*: an inode that loses its name may be opened yet (``Namespace.keep_removed``).
        *evicts*: who evicts tells the heat, which remembers it. *found*: files say it, so no block
        counts as used now.
        """
        super().__init__(pool, pool.counters, begun, NO_INODE, lasting=lasting)
        self._tree = pool
        self._now_ns = now_ns
        self._keeps = keeps
        self._evicts = evicts
        self._found = found
        self._directories: dict[InodeNo, InodeRecord] = {}
        self._come: list[tuple[InodeNo, InodeRecord, Attributes]] = []
        self._gone: list[tuple[InodeNo, InodeRecord, Attributes]] = []
        self._moved: Sequence[Move] = ()
        self._replaced: list[tuple[InodeNo, InodeNo]] = []
        self._handed: list[tuple[Move, Attributes]] = []
        self._taken: list[tuple[InodeNo, InodeRecord, int, Attributes]] = []
        #: Of those that are or may be open: the attributes that they keep without a name.
        self._left: dict[InodeNo, Attributes] = {}

    def link(
        self, ino: InodeNo, record: InodeRecord, attributes: Attributes = _NO_ATTRIBUTES
    ) -> None:
        """Enter *ino*, which had no name so far, under the name in *record*, which is free.

        Raises DeadInode, NotADirectory.
        """
        self._count(record, 1)
        self._enter(ino, record, attributes)

    def unlink(self, ino: InodeNo, record: InodeRecord) -> None:
        """Remove *ino* and its name. Raises DeadInode, NotADirectory."""
        self._count(record, -1)
        self._drop(ino, record)

    def replace(
        self,
        ino: InodeNo,
        record: InodeRecord,
        new: InodeNo,
        new_record: InodeRecord,
        attributes: Attributes,
    ) -> None:
        """Let the name of *ino* lead to inode *new* instead; its directory stays as it is."""
        self._drop(ino, record)
        self._enter(new, new_record, attributes)
        self._replaced.append((ino, new))

    def move(self, *moves: Move) -> None:
        """Give each inode its new name, which is free or belongs to another of these *moves*.

        Raises DeadInode, NotADirectory.
        """
        for ino, before, after in moves:
            stays = before.parent == after.parent
            self._count(before, 0 if stays else -1)
            if not stays:
                self._count(after, 1)
            self.txn.delete_name(before.parent, before.name, ino)
            if before.uid != after.uid:  # said by a file: a rename leaves the owner
                self._handed.append((Move(ino, before, after), self._attributes(ino)))
        for ino, before, after in moves:
            growth_bytes = after.allocated_bytes - before.allocated_bytes
            if growth_bytes:  # what was written after a checkpoint
                used_bytes = self._counters.used_bytes + growth_bytes
                self._counters = self._counters._replace(used_bytes=used_bytes)
            put_rows(self.txn, ino, after)
            if after.sequence > self._counters.sequence:
                self._counters = self._counters._replace(sequence=after.sequence)
        self._moved = moves

    def take_attributes(self, ino: InodeNo, record: InodeRecord, attributes: Attributes) -> None:
        """Give *ino*, which has *record* in the end, these *attributes* and no others."""
        before = replace_attributes(self.txn, ino, attributes)
        self._taken.append((ino, record, attributes_bytes(before), attributes))

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

    def _enter(self, ino: InodeNo, record: InodeRecord, attributes: Attributes) -> None:
        put_rows(self.txn, ino, record)
        self._counters = counted(self._counters, record, 1)
        if record.sequence > self._counters.sequence:
            self._counters = self._counters._replace(sequence=record.sequence)
        if attributes or record.state not in UNFINISHED:
            put_attributes(self.txn, ino, attributes)
            self._come.append((ino, record, attributes))

    def _drop(self, ino: InodeNo, record: InodeRecord) -> None:
        attributes = drop_rows(self.txn, ino, record)
        self._counters = counted(self._counters, record, -1)
        self._gone.append((ino, record, attributes))

    def _complete(self) -> None:
        for ino, record in self._directories.items():
            self.txn.put_inode(ino, record)
        if self._gone:
            open_inodes = self._tree.open_inodes
            for ino, record, attributes in self._gone:
                if self._keeps or ino in open_inodes:  # before the index forgets it
                    gone = record._replace(ctime_ns=self._now_ns)
                    self._left[ino] = self._tree.open_notes.lose_name(ino, gone, attributes)
        super()._complete()

    def _learn(self) -> None:
        """Let memory follow. A removed inode that is open keeps its attributes in memory."""
        super()._learn()
        pool, shares = self._tree, self._tree.node_shares
        for ino, new in self._replaced:  # before *ino* goes
            pool.pins.move(ino, new)
        for ino, record, attributes in self._gone:
            shares.go(ino, record, attributes)
            pool.leases.drop(ino)
            pool.pins.drop(ino)
            if not self._evicts:
                pool.heat.drop(ino)
            if (opened := pool.open_inodes.get(ino)) is not None:
                opened.attributes = self._left[ino]
        for ino, record, attributes in self._come:
            if record.state == State.NODE:
                shares.come(ino, record)
            elif record.state in SETTLED:
                self._enter_tables(ino, record)
            if attributes:
                shares.set_attributes(ino, record, attributes_bytes(attributes))
                pool.identities.note_attributes(ino)
                if attributes.get(PIN) == b"1" and ino not in pool.pins:
                    pool.pins.set(ino, record.allocated_bytes)
        for (ino, before, record), attributes in self._handed:
            shares.hand_over(ino, before, record, attributes)
        for ino, record, before_bytes, attributes in self._taken:
            shares.set_attributes(ino, record, attributes_bytes(attributes) - before_bytes)
            if not stat.S_ISDIR(record.mode):  # what a directory's pin holds is counted by a scan
                pool.pins.drop(ino)
                if attributes.get(PIN) == b"1":
                    pool.pins.set(ino, record.allocated_bytes)
        for ino, _, record in self._moved:
            self._enter_tables(ino, record)

    def _enter_tables(self, ino: InodeNo, record: InodeRecord) -> None:
        """Let lease and rank of *ino* follow its name, state and size, which are committed."""
        pool = self._tree
        if stat.S_ISDIR(record.mode):
            pool.policies.clear()
        elif not stat.S_ISREG(record.mode):
            return
        elif self._found:
            enter_lease(pool, ino, record)
            enter_rank(pool, ino, record)
        else:
            pool.leases.note(ino, record, pool.monotonic_s())
            ranks.note(pool, ino, record)
