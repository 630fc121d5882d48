"""Totals of the inodes of an index, and which of them are reachable from the root.

Every change keeps the counters and each directory's counts up to date. This file counts from
scratch, for a rebuilt index and for fsck.
"""

import stat
from collections.abc import Callable

from kvfs.core.errors import Damaged
from kvfs.core.records import Counters
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord


class TreeCount:
    """Counts inodes one by one. Memory grows with the directories, not with the blocks."""

    def __init__(self, inode: Callable[[InodeNo], InodeRecord | None]) -> None:
        """*inode* reads a record (it may raise Damaged), to follow a directory's parents."""
        self._inode = inode
        self._joined: dict[InodeNo, bool] = {ROOT_INODE: True}
        #: Names and subdirectories by directory; one without names is missing.
        self.names: dict[InodeNo, tuple[int, int]] = {}
        self._by_kind: dict[int, int] = {}
        self._used_bytes = 0
        self._sequence = 0

    def note(self, ino: InodeNo, record: InodeRecord) -> bool:
        """Count *ino* and return True; return False if its parents do not lead to the root."""
        self._sequence = max(self._sequence, record.sequence)
        is_directory = stat.S_ISDIR(record.mode)
        if ino != ROOT_INODE:
            if not self.joined(record.parent):
                return False
            entries, subdirs = self.names.get(record.parent, (0, 0))
            self.names[record.parent] = (entries + 1, subdirs + is_directory)
        kind = stat.S_IFMT(record.mode)
        self._by_kind[kind] = self._by_kind.get(kind, 0) + 1
        if kind == stat.S_IFREG:
            self._used_bytes += record.allocated_bytes
        return True

    def joined(self, directory: InodeNo) -> bool:
        """Whether *directory* is a directory and its parents lead to the root."""
        way: list[InodeNo] = []
        at = directory
        while (known := self._joined.get(at)) is None:
            way.append(at)
            self._joined[at] = False  # coming here again means that the parents form a cycle
            record = self._directory(at)
            if record is None:
                known = False
                break
            at = record.parent
        for passed in way:
            self._joined[passed] = known
        return known

    def counters(self) -> Counters:
        """Return the counters of what was noted so far."""
        by_kind = dict(self._by_kind)
        return Counters(
            blocks=by_kind.pop(stat.S_IFREG, 0),
            used_bytes=self._used_bytes,
            directories=by_kind.pop(stat.S_IFDIR, 0),
            symlinks=by_kind.pop(stat.S_IFLNK, 0),
            others=sum(by_kind.values()),
            sequence=self._sequence,
        )

    def _directory(self, ino: InodeNo) -> InodeRecord | None:
        try:
            record = self._inode(ino)
        except Damaged:
            return None
        return record if record is not None and stat.S_ISDIR(record.mode) else None
