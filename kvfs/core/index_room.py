"""How much room rows have: in the index's map, and in the pool for what is never evicted. Pure.

Names need space in the index, whatever their blocks hold. LMDB changes nothing in place, so in a
full map even deletes fail (MDB_MAP_FULL in lmdb.h), and with them eviction and the next start. So
new rows are refused before that, and eviction begins even earlier. On a full device the file has
only preallocated space, and new rows leave a part of that.

Directories, symlinks and attributes are never evicted, so their space is bounded. A name costs its
rows in the index, an inode (1 KiB in an XFS that kvfs made), and for a symlink a block. Blocks are
not counted, because they can be evicted.
"""

import stat
from collections.abc import Callable, Mapping
from typing import Final

from kvfs.core.account import Taken
from kvfs.core.changed import Changed, Why
from kvfs.core.errors import NoSpace
from kvfs.core.lifecycle import State
from kvfs.core.pool_layout import XFS_INODE_BYTES
from kvfs.core.records import CHILD_PREFIX, NAME_PREFIX, XATTR_PREFIX, Counters
from kvfs.core.types import PAGE_BYTES, InodeNo, InodeRecord, round_up

#: New rows leave this much free, both of the map and of the space allocated to the file. The
#: largest batch of an eviction changes some 150 pages of 4 KiB, and pages freed by the two
#: transactions before it cannot be used yet.
KEPT_BYTES: Final = 4 << 20
_KEPT_SHARE: Final = 1 / 16
_KEPT_MOST_SHARE: Final = 1 / 4
#: Of a file that cannot grow, eviction begins at this share: pages become free when all of their
#: rows are gone, so it begins well ahead, as with the map.
_BEGIN_SHARE: Final = 7 / 8
#: Share of the rows at which eviction begins.
_BINDING_SHARE: Final = 31 / 32
#: LMDB is asked once in this many commits; earlier if commits of the largest size (an attribute,
#: and pages) could use up what is left.
COMMITS_PER_LOOK: Final = 64
_COMMIT_MOST_BYTES: Final = 128 << 10


def mapped_bytes(map_bytes: int, used_bytes: int) -> int:
    """Return how much LMDB must map of a file in which it uses *used_bytes*.

    The limit is *map_bytes*. A larger file (the setting was larger, or a rebuild found more names)
    is mapped with space for deletes; otherwise nothing could be removed from it.
    """
    return max(map_bytes, used_bytes + _least_kept_bytes(map_bytes))


def _least_kept_bytes(map_bytes: int) -> int:
    return min(KEPT_BYTES, int(map_bytes * _KEPT_MOST_SHARE))


class IndexRoom:
    """Compares the rows with the map of *map_bytes*."""

    def __init__(
        self,
        map_bytes: int,
        rows_bytes: Callable[[], int],
        file_end_bytes: Callable[[], int] | None = None,
    ) -> None:
        """*rows_bytes* returns how much of the map holds rows.

        *file_end_bytes* returns how much rows may take of the space allocated to the file.
        """
        self._file_end_bytes = file_end_bytes
        self.map_bytes: Final = map_bytes
        self.rows_bytes: Final = rows_bytes
        kept_bytes = max(map_bytes * _KEPT_SHARE, _least_kept_bytes(map_bytes))
        self._growth_end_bytes = map_bytes - int(kept_bytes)
        self._eviction_begin_bytes = map_bytes - 2 * int(kept_bytes)
        #: How many bytes the rows may have, because memory has no room for a larger file; None:
        #: the file can grow.
        self._bound_bytes: int | None = None
        #: Whether the last check found no space for a new name or attribute.
        self.crowded = False
        self.measure()

    def bind(self, end_bytes: int | None) -> None:
        """Let names go below *end_bytes*, because the file cannot grow; None: it can."""
        self._bound_bytes = end_bytes

    @property
    def is_bound(self) -> bool:
        """Whether blocks give way for names because memory has no room for a larger file."""
        return self._bound_bytes is not None

    def note_commit(self) -> None:
        """Note that a transaction was committed."""
        self._commits_to_look -= 1
        if self._commits_to_look <= 0:
            self.measure()

    def require(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Raise NoSpace if *rows* (None: a removed one) add a name and there is no space."""
        if self.crowded and _grows(rows):
            self.measure()
            if self.crowded:
                raise NoSpace("index: its map or the device takes no more names")

    def excess_names(self, names: int) -> int:
        """Return how many of all names (there are *names*) must go to make space for others."""
        rows_bytes = self.rows_bytes()
        begin_bytes = self._eviction_begin_bytes
        if self._bound_bytes is not None:
            begin_bytes = min(begin_bytes, int(self._bound_bytes * _BEGIN_SHARE))
        excess_bytes = max(0, rows_bytes - begin_bytes)
        return -(-names * excess_bytes // max(1, rows_bytes))

    def binds(self) -> bool:
        """Whether blocks are evicted for names, which stops a page below where it begins."""
        return self.rows_bytes() > self._eviction_begin_bytes * _BINDING_SHARE

    def measure(self) -> None:
        """Ask LMDB how much space is left."""
        end_bytes = self._growth_end_bytes
        if self._file_end_bytes is not None:
            end_bytes = min(end_bytes, self._file_end_bytes())
        left_bytes = end_bytes - self.rows_bytes()
        self.crowded = left_bytes <= 0
        self._commits_to_look = min(left_bytes // _COMMIT_MOST_BYTES, COMMITS_PER_LOOK)


def _grows(rows: Mapping[bytes, bytes | None]) -> bool:
    """Whether *rows* add more names or attributes than they take away.

    A name that now leads to another inode keeps its name row, and an inode that is renamed within
    its directory keeps its child row. Only something new adds both.
    """
    names = children = attributes = 0
    for key, value in rows.items():
        change = -1 if value is None else 1
        if key.startswith(NAME_PREFIX):
            names += change
        elif key.startswith(CHILD_PREFIX):
            children += change
        elif key.startswith(XATTR_PREFIX):
            attributes += change
    return min(names, children) > 0 or attributes > 0


#: The bound, as a share of the capacity, or of the index's map if that is smaller. Above it, each
#: user other than root is held to a share of it.
_SHARE: Final = 1 / 4
#: The bound is at least this, because a small pool is for tests and has few directories.
_LEAST_BYTES: Final = 8 << 20
#: This many times the bound is the limit of all users together.
_ALL_REFUSED: Final = 2
#: The rows of one inode: its name, its child row and its record (docs/eviction.md).
ROWS_BYTES: Final = 550
#: What an attribute takes besides name and value: key, checksum and its place in the tree.
_ATTRIBUTE_BYTES: Final = 64


def unevictable_bytes(counters: Counters, rows_bytes: int) -> int:
    """Return about how many bytes of the device hold what is never evicted."""
    nodes = counters.directories + counters.symlinks + counters.others
    own_rows_bytes = max(0, rows_bytes - counters.blocks * ROWS_BYTES)
    return own_rows_bytes + nodes * XFS_INODE_BYTES + counters.symlinks * PAGE_BYTES


def bound_bytes(whole_bytes: int) -> int:
    """Return the bound for a pool or index of *whole_bytes*; above it, shares are enforced."""
    return max(_LEAST_BYTES, int(whole_bytes * _SHARE))


def names_too_many(counters: Counters, capacity_bytes: int) -> int:
    """Return how many blocks must go so that the names of all blocks fit into the bound."""
    return max(0, counters.blocks - bound_bytes(capacity_bytes) // (ROWS_BYTES + XFS_INODE_BYTES))


def attribute_bytes(name: bytes, value: bytes | None) -> int:
    """Return the bytes that one attribute counts for; 0 without a *value*."""
    return 0 if value is None else _row_bytes(_ATTRIBUTE_BYTES + len(name) + len(value))


def attributes_bytes(attributes: Mapping[bytes, bytes | None]) -> int:
    """Return the bytes that *attributes*, values by name, count for."""
    return sum(attribute_bytes(name, value) for name, value in attributes.items())


class NodeShares:
    """Counts these bytes for each tenant but root, and tells who is refused more.

    Above the bound each has an equal share of it, and only a tenant over that share is refused.
    Tenants who take their shares one after the other can exceed the bound. So there is a second
    bound, at which everybody is refused.

    A scan counts what was there before the start. Inodes that it has not reached count for nobody,
    so that no tenant is ever refused for what others hold. The second bound needs no scan.
    """

    follows: Final = frozenset(
        {
            Why.CREATED,
            Why.RESTORED,
            Why.MOVED,
            Why.SET,
            Why.ATTRIBUTED,
            Why.REPLACED,
            Why.REMOVED,
            Why.LOST,
            Why.EVICTED,
            Why.RECONCILED,
        }
    )

    def __init__(self, is_new: Callable[[InodeNo], bool], names: Taken) -> None:
        """Count in *names*. *is_new*: an inode is made in this run; the scan counts all others."""
        self._is_new = is_new
        self._names = names
        #: The inodes up to which the scan has counted nodes, and attributes.
        self._inodes_end = self._attributes_end = InodeNo(0)

    def refuses(self, uid: int, everyones_bytes: int, whole_bytes: int) -> bool:
        """Whether *uid* is refused more, if all users together hold *everyones_bytes*.

        *whole_bytes* is what the pool can hold, or the index if that is less.
        """
        end_bytes = bound_bytes(whole_bytes)
        if not uid or everyones_bytes < end_bytes:
            return False
        if everyones_bytes >= _ALL_REFUSED * end_bytes:
            return True
        return self._names.has_its_part(uid, end_bytes)

    # ---- the scan ----

    def find(self, ino: InodeNo, record: InodeRecord) -> None:
        """Count a directory, symlink or special file from before the start."""
        if not self._is_new(ino):
            self._count(record.uid, _node_bytes(record))

    def find_attribute(self, ino: InodeNo, record: InodeRecord, size_bytes: int) -> None:
        """Count an attribute from before the start."""
        if not self._is_new(ino):
            self._count(record.uid, size_bytes)

    def reach(self, ino: InodeNo) -> None:
        """Note that all inodes up to *ino* are counted."""
        self._inodes_end = ino

    def reach_attributes(self, ino: InodeNo) -> None:
        """Note that attributes of all inodes below *ino* are counted, those of *ino* in part."""
        self._attributes_end = ino

    # ---- what changes ----

    def follow(self, changed: Changed) -> None:
        """Add what *changed* added to its owner's bytes, and subtract what it removed."""
        ino, before, after = changed.ino, changed.before, changed.after
        if before is not None and (after is None or before.uid != after.uid):
            self.go(ino, before)
        if after is not None and (before is None or before.uid != after.uid):
            self.come(ino, after)
        if before is not None and changed.lost:
            self.set_attributes(ino, before, -attributes_bytes(changed.lost))
        if after is not None and changed.gained:
            self.set_attributes(ino, after, attributes_bytes(changed.gained))

    def come(self, ino: InodeNo, record: InodeRecord) -> None:
        """Count a new directory, symlink or special file; not a block."""
        if record.state == State.NODE and self._is_counted(ino):
            self._count(record.uid, _node_bytes(record))

    def set_attributes(self, ino: InodeNo, record: InodeRecord, change_bytes: int) -> None:
        """Count *change_bytes* more, or less if negative, for the attributes of *ino*."""
        if ino < self._attributes_end or self._is_new(ino):
            self._count(record.uid, change_bytes)

    def go(self, ino: InodeNo, record: InodeRecord) -> None:
        """Stop counting a directory, symlink or special file."""
        if record.state == State.NODE and self._is_counted(ino):
            self._count(record.uid, -_node_bytes(record))

    def _is_counted(self, ino: InodeNo) -> bool:
        return ino <= self._inodes_end or self._is_new(ino)

    def _count(self, uid: int, change_bytes: int) -> None:
        if uid:
            self._names.count(uid, change_bytes)


def _node_bytes(record: InodeRecord) -> int:
    """Return about how many bytes a directory, symlink or special file takes; never changes."""
    size_bytes = XFS_INODE_BYTES + _row_bytes(ROWS_BYTES + len(record.target))
    return size_bytes + PAGE_BYTES * stat.S_ISLNK(record.mode)


def _row_bytes(size_bytes: int) -> int:
    """Return what a row of *size_bytes* takes: whole pages if two rows do not fit into one."""
    return size_bytes if size_bytes < PAGE_BYTES // 2 else round_up(size_bytes)
