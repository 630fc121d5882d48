"""Bounds the space of directories, symlinks and attributes, because they are never evicted.

Pure. A name costs its rows in the index, an inode (1 KiB in an XFS that kvfs made), and for a
symlink a block. Blocks are not counted, because they can be evicted.
"""

import stat
from collections.abc import Mapping
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.lifecycle import State
from kvfs.core.pool_layout import XFS_INODE_BYTES
from kvfs.core.records import Counters
from kvfs.core.types import PAGE_BYTES, InodeNo, InodeRecord, round_up

#: The bound, as a share of the capacity, or of the index's map if that is smaller. Above it, each
#: user other than root is held to a share of it.
_SHARE: Final = 1 / 4
#: The bound is at least this, because a small pool is for tests and has few directories.
_LEAST_BYTES: Final = 8 << 20
#: This many times the bound is the limit of all users together.
_ALL_REFUSED: Final = 2
#: The rows of one inode: its name, its child row and its record (docs/eviction.md).
_ROWS_BYTES: Final = 550
#: What an attribute takes besides name and value: key, checksum and its place in the tree.
_ATTRIBUTE_BYTES: Final = 64


def taken_bytes(counters: Counters, rows_bytes: int) -> int:
    """Return about how many bytes of the device hold what is never evicted."""
    nodes = counters.directories + counters.symlinks + counters.others
    own_rows_bytes = max(0, rows_bytes - counters.blocks * _ROWS_BYTES)
    return own_rows_bytes + nodes * XFS_INODE_BYTES + counters.symlinks * PAGE_BYTES


def bound_bytes(whole_bytes: int) -> int:
    """Return the bound for a pool or index of *whole_bytes*; above it, shares are enforced."""
    return max(_LEAST_BYTES, int(whole_bytes * _SHARE))


def names_too_many(counters: Counters, capacity_bytes: int) -> int:
    """Return how many blocks must go so that the names of all blocks fit into the bound."""
    return max(0, counters.blocks - bound_bytes(capacity_bytes) // (_ROWS_BYTES + XFS_INODE_BYTES))


def attribute_bytes(name: bytes, value: bytes | None) -> int:
    """Return the bytes that one attribute counts for; 0 without a *value*."""
    return 0 if value is None else _row_bytes(_ATTRIBUTE_BYTES + len(name) + len(value))


def attributes_bytes(attributes: Mapping[bytes, bytes | None]) -> int:
    """Return the bytes that *attributes*, values by name, count for."""
    return sum(attribute_bytes(name, value) for name, value in attributes.items())


class NodeShares:
    """How many of these bytes each user but root holds, and who is refused more.

    Above the bound each user has an equal share of it, and only a user over that share is refused.
    Users who take their shares one after the other can exceed the bound. So there is a second
    bound, at which everybody is refused.

    A scan counts what was there before the start. Inodes that it has not reached count for nobody,
    so that a user is never refused for what others hold. The second bound needs no scan.
    """

    follows: Final = frozenset(
        {
            Why.CREATED,
            Why.RESTORED,
            Why.SET,
            Why.ATTRIBUTED,
            Why.REPLACED,
            Why.REMOVED,
            Why.LOST,
            Why.EVICTED,
            Why.RECONCILED,
        }
    )

    def __init__(self, first: InodeNo) -> None:
        """Inodes from *first* on are created in this run; the scan counts all others."""
        self._first = first
        #: The inodes up to which the scan has counted nodes, and attributes.
        self._inodes_end = self._attributes_end = InodeNo(0)
        self._held: dict[int, int] = {}

    def held_bytes(self, uid: int) -> int:
        """Return how much user *uid* is known to hold."""
        return self._held.get(uid, 0)

    def refuses(self, uid: int, everyones_bytes: int, whole_bytes: int) -> bool:
        """Whether *uid* is refused more, if all users together hold *everyones_bytes*.

        *whole_bytes* is what the pool can hold, or the index if that is less.
        """
        end_bytes = bound_bytes(whole_bytes)
        if not uid or everyones_bytes < end_bytes:
            return False
        if everyones_bytes >= _ALL_REFUSED * end_bytes:
            return True
        held_bytes = self.held_bytes(uid)
        return held_bytes > 0 and held_bytes >= end_bytes / len(self._held)

    # ---- the scan ----

    def find(self, ino: InodeNo, record: InodeRecord) -> None:
        """Count a directory, symlink or special file from before the start."""
        if ino < self._first:
            self._note(record.uid, _node_bytes(record))

    def find_attribute(self, ino: InodeNo, record: InodeRecord, size_bytes: int) -> None:
        """Count an attribute from before the start."""
        if ino < self._first:
            self._note(record.uid, size_bytes)

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
            self._note(record.uid, _node_bytes(record))

    def set_attributes(self, ino: InodeNo, record: InodeRecord, change_bytes: int) -> None:
        """Count *change_bytes* more, or less if negative, for the attributes of *ino*."""
        if ino >= self._first or ino < self._attributes_end:
            self._note(record.uid, change_bytes)

    def go(self, ino: InodeNo, record: InodeRecord) -> None:
        """Stop counting a directory, symlink or special file."""
        if record.state == State.NODE and self._is_counted(ino):
            self._note(record.uid, -_node_bytes(record))

    def _is_counted(self, ino: InodeNo) -> bool:
        return ino >= self._first or ino <= self._inodes_end

    def _note(self, uid: int, change_bytes: int) -> None:
        if not uid:
            return
        held_bytes = self._held.get(uid, 0) + change_bytes
        if held_bytes > 0:
            self._held[uid] = held_bytes
        else:
            self._held.pop(uid, None)


def _node_bytes(record: InodeRecord) -> int:
    """Return about how many bytes a directory, symlink or special file takes; never changes."""
    size_bytes = XFS_INODE_BYTES + _row_bytes(_ROWS_BYTES + len(record.target))
    return size_bytes + PAGE_BYTES * stat.S_ISLNK(record.mode)


def _row_bytes(size_bytes: int) -> int:
    """Return what a row of *size_bytes* takes: whole pages if two rows do not fit into one."""
    return size_bytes if size_bytes < PAGE_BYTES // 2 else round_up(size_bytes)
