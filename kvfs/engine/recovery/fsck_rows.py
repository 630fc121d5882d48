"""fsck's check of the index: each row is compared with all others that must agree with it.

Each problem has one repair, which leaves a miss at worst. A row that cannot be read or leads
nowhere is dropped; a readdir row or count that follows from the rest is rewritten.
"""

import stat
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from kvfs.core.drives import DriveCounts, Recount
from kvfs.core.errors import Damaged
from kvfs.core.inode_rules import TreeCount, alias_of, block_of, without_alias
from kvfs.core.lifecycle import State
from kvfs.core.records import (
    CHILD_PREFIX,
    INODE_PREFIX,
    NAME_PREFIX,
    XATTR_PREFIX,
    Counters,
    child_key,
    parse_child_key,
    parse_inodes,
    parse_name,
    parse_name_key,
    parse_xattr_key,
    unseal,
)
from kvfs.core.types import NO_INODE, ROOT_INODE, InodeNo, InodeRecord
from kvfs.engine.names.tree_change import drop_rows, put_counts, put_rows
from kvfs.storage.drive_rows import read_drive_counts
from kvfs.storage.index import Index
from kvfs.storage.index_transaction import WriteTransaction

_STEP: Final = 1024

Repair = Callable[[WriteTransaction], object]
#: Looks at one inode's files; returns what is wrong with them if the inode must go.
Files = Callable[[InodeNo, InodeRecord], str | None]
#: Returns the value of an attribute in the file of its inode, if it is there.
Attribute = Callable[[InodeNo, bytes], bytes | None]
#: Returns the record in the identity file of a directory or symlink, if there is one.
Node = Callable[[InodeNo], InodeRecord | None]
#: More problems than this are only counted.
PROBLEMS_MAX: Final = 10_000


class FsckReport:
    """What is wrong with a pool, one line for each problem, and what was done about it.

    ``repaired`` counts repairs; ``blocks`` and ``directories`` count what the pool holds. A pool
    with a million broken rows must not fill the memory.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.found = 0
        self.repaired = 0
        self.blocks = 0
        self.directories = 0
        #: Extents whose bytes failed their checksum: inode, bytes.
        self.quarantined: tuple[tuple[int, int], ...] = ()
        #: Files that belong to no inode, kept for a while: inode, bytes, since when (ns).
        self.strays: tuple[tuple[int, int, int], ...] = ()

        #: The drives that are missing, by number and UUID, and how many inodes were not looked at.
        self.missing: tuple[tuple[int, str], ...] = ()
        self.unchecked = 0

    def problem(self, text: str) -> None:
        """Note a problem."""
        self.found += 1
        if self.found <= PROBLEMS_MAX:
            self.problems.append(text)
        elif self.found == PROBLEMS_MAX + 1:
            self.problems.append(f"and more than {PROBLEMS_MAX} others")


class RowCheck:
    """Checks the rows of one index; with *before_repair*, called before each repair, mends them."""

    def __init__(
        self,
        index: Index,
        report: FsckReport,
        *,
        before_repair: Callable[[], None] | None,
        drives: int,
    ) -> None:
        """*drives*: how many the pool lies on."""
        self._index = index
        self._report = report
        self._drives = drives
        self._before_repair = before_repair

    def run(
        self, files: Files, node: Node, attribute: Attribute, tell: Callable[[int], None]
    ) -> None:
        """Check everything; *tell* is called with the number of inodes that are done."""
        self._nodes(node)
        self._inodes(files, tell)
        self._names()
        self._children()
        self._attributes(attribute)
        self._tree()

    def _wrong(self, text: str, repair: Repair) -> None:
        self._report.problem(text)
        if self._before_repair is not None:
            self._before_repair()
            with self._index.write() as txn:
                repair(txn)
            self._report.repaired += 1

    # ---- one keyspace after another ----

    def _nodes(self, node: Node) -> None:
        """Mend the records of directories first: all below a dropped one would be dropped, too."""
        for ino, record in self._records():
            if record is not None or (said := node(ino)) is None:
                continue
            try:
                named = self._index.lookup(said.parent, said.name) == ino
            except Damaged:
                continue
            if named:  # else it has the name from before a rename
                text = f"inode {ino:#x} {said.name!r}: damaged record, its identity is whole"
                self._wrong(text, _recording(ino, said))

    def _inodes(self, files: Files, tell: Callable[[int], None]) -> None:
        for done, (ino, record) in enumerate(self._records(), 1):
            if done % _STEP == 0:
                tell(done)
            if record is None:
                self._wrong(f"inode {ino:#x}: damaged record", _dropping(ino, None))
                continue
            if ino == ROOT_INODE:
                continue
            who = f"inode {ino:#x} {record.name!r}"
            leads_to = self._lookup(ino, record)
            if leads_to is not None and leads_to != ino:
                self._wrong(f"{who}: the name is that of {leads_to:#x}", _dropping(ino, None))
                continue
            what = files(ino, record)
            if record.state == State.ALIAS and not self._are_paired(block_of(record), ino):
                what = "a second name of a block that does not know it"
            if what is not None:
                self._wrong(f"{who}: {what}", _dropping(ino, record))
            elif leads_to is None or not self._is_listed(ino, record):
                self._wrong(f"{who}: the name does not lead there", _naming(ino, record))
            if what is None and (alias := alias_of(record)) and not self._are_paired(ino, alias):
                text = f"{who}: its second name is not there"
                self._wrong(text, _recording(ino, without_alias(record)))

    def _names(self) -> None:
        for key, raw in self._rows(NAME_PREFIX):
            try:
                parent, name = parse_name_key(key)
                ino = parse_name(key, raw)
                if self._may_lead(parent, name, ino):
                    continue
                what = f"name {name!r} in {parent:#x}: leads to {ino:#x}, which has another"
            except Damaged as error:
                what = str(error)
            self._wrong(what, _deleting(key))

    def _children(self) -> None:
        for key, raw in self._rows(CHILD_PREFIX):
            try:
                parent, ino = parse_child_key(key)
                name = unseal(key, raw)
                if self._is_of(ino, parent, name):
                    continue
                what = f"list of {parent:#x}: {name!r} is not the name of {ino:#x}"
            except Damaged as error:
                what = str(error)
            self._wrong(what, _deleting(key))

    def _attributes(self, attribute: Attribute) -> None:
        for key, raw in self._rows(XATTR_PREFIX):
            try:
                ino, name = parse_xattr_key(key)
            except Damaged as error:
                self._wrong(str(error), _deleting(key))
                continue
            try:
                unseal(key, raw)
                if self._index.inode(ino) is not None:
                    continue
                what, kept = f"attribute {name!r}: its inode {ino:#x} is not there", None
            except Damaged as error:
                what, kept = str(error), attribute(ino, name)
            self._wrong(what, _deleting(key) if kept is None else _keeping(ino, name, kept))

    def _tree(self) -> None:
        """Check that everything is below the root, and that every count is right."""
        tree_count = TreeCount(self._index.inode, self._drives)
        said: dict[InodeNo, tuple[int, int]] = {}
        for ino, record in self._records():
            if record is None:
                continue
            if not tree_count.count(ino, record):
                text = f"inode {ino:#x} {record.name!r}: no way leads there from the root"
                self._wrong(text, _dropping(ino, record))
            elif stat.S_ISDIR(record.mode):
                said[ino] = (record.entries, record.subdirs)
        for ino, counts in said.items():
            counted = tree_count.names.get(ino, (0, 0))
            if counts != counted:
                text = f"directory {ino:#x}: {counts} names and subdirectories, counted {counted}"
                self._wrong(text, _counting(ino, *counted))
        self._counters(tree_count.counters())
        self._drive_counts(tree_count.by_drive)

    def _counters(self, counted: Counters) -> None:
        self._report.blocks = counted.blocks
        self._report.directories = counted.directories
        try:
            said = self._index.counters()
        except Damaged as error:
            self._wrong(str(error), lambda txn: txn.put_counters(counted))
            return
        right = counted._replace(sequence=max(counted.sequence, said.sequence))
        if said != right:
            text = f"counters: {tuple(said)}, counted {tuple(right)}"
            self._wrong(text, lambda txn: txn.put_counters(right))

    def _drive_counts(self, counted: DriveCounts) -> None:
        """Check what the index says of drives from 1 on; the counters say the rest."""
        right = counted.rows()
        try:
            said = read_drive_counts(self._index, self._drives).rows()
        except Damaged as error:
            self._wrong(str(error), lambda txn: txn.put_drive_counts(right))
            return
        for drive, count in right.items():
            if said[drive] != count:
                text = f"drive {drive}: {tuple(said[drive])}, counted {tuple(count)}"
                self._wrong(text, _recounting({drive: count}))

    # ---- reading ----

    def _records(self) -> Iterator[tuple[InodeNo, InodeRecord | None]]:
        return parse_inodes(self._rows(INODE_PREFIX))

    def _rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return chain.from_iterable(self._index.walk(prefix, _STEP))

    def _lookup(self, ino: InodeNo, record: InodeRecord) -> InodeNo | None:
        """Return the inode that has *record*'s name, as a lookup of the name tells; None: none has.

        *ino* has the *record*. If it is an alias, a lookup leads to its block.
        """
        try:
            found = self._index.lookup(record.parent, record.name)
            if not found or not self._may_lead(record.parent, record.name, found):
                return None
        except Damaged:
            return None
        return ino if self._are_paired(found, ino) else found

    def _is_listed(self, ino: InodeNo, record: InodeRecord) -> bool:
        key = child_key(record.parent, ino)
        try:
            return any(unseal(*rows[0]) == record.name for rows in self._index.walk(key, 1))
        except Damaged:
            return False

    def _is_of(self, ino: InodeNo, parent: InodeNo, name: bytes) -> bool:
        """Whether *name* in *parent* is the one name in the record of *ino*. Raises Damaged."""
        record = self._index.inode(ino)
        return record is not None and (record.parent, record.name) == (parent, name)

    def _may_lead(self, parent: InodeNo, name: bytes, ino: InodeNo) -> bool:
        """Whether *name* in *parent* is that of *ino*, or of its alias. Raises Damaged."""
        if self._is_of(ino, parent, name):
            return True
        record = self._index.inode(ino)
        alias = NO_INODE if record is None else alias_of(record)
        return self._are_paired(ino, alias) and self._is_of(alias, parent, name)

    def _are_paired(self, block: InodeNo, alias: InodeNo) -> bool:
        """Whether the records of *block* and of *alias* name each other."""
        record, named = map(self._index.inode_or_miss, (block, alias))
        if record is None or named is None or named.state != State.ALIAS:
            return False
        return alias_of(record) == alias and block_of(named) == block


def _deleting(key: bytes) -> Repair:
    return lambda txn: txn.delete_row(key)


def _keeping(ino: InodeNo, name: bytes, value: bytes) -> Repair:
    return lambda txn: txn.put_xattr(ino, name, value)


def _dropping(ino: InodeNo, record: InodeRecord | None) -> Repair:
    return lambda txn: drop_rows(txn, ino, record)


def _recording(ino: InodeNo, record: InodeRecord) -> Repair:
    return lambda txn: txn.put_inode(ino, record)


def _naming(ino: InodeNo, record: InodeRecord) -> Repair:
    return lambda txn: put_rows(txn, ino, record)


def _recounting(recount: Recount) -> Repair:
    return lambda txn: txn.put_drive_counts(recount)


def _counting(ino: InodeNo, entries: int, subdirs: int) -> Repair:
    return lambda txn: put_counts(txn, ino, entries, subdirs)
