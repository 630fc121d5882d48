"""Index rows that cannot be read: their names become misses, and `kvfs status` counts them.

A name that leads to an error for ever could neither be used nor made anew. What hangs on a lost
row (counts, the other rows) stays as it is until ``kvfs fsck --repair``.
"""

import logging
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.core.records import child_key, name_key, parse_child_key, unseal
from kvfs.core.types import InodeNo
from kvfs.storage.index import Index

_log: Final = logging.getLogger(__name__)


class Damage:
    """What was found damaged in this run."""

    def __init__(self, index: Index, *, read_only: bool) -> None:
        self._index = index
        self._read_only = read_only
        #: Inodes whose record cannot be read; their names go at the next lookup.
        self.inodes: set[InodeNo] = set()
        self.misses = 0

    def miss_name(self, parent: InodeNo, name: bytes, ino: InodeNo | None, error: str) -> None:
        """Drop *name* in *parent*, which leads nowhere or to the damaged *ino*. Raises NoSpace."""
        self.misses += 1
        _log.error("%r in inode %#x: %s; kvfs fsck --repair repairs it", name, parent, error)
        if self._read_only:
            return
        with self._index.write() as txn:
            txn.delete_row(name_key(parent, name))
            if ino is not None:
                txn.delete_row(child_key(parent, ino))
                txn.delete_inode(ino)
                txn.delete_xattrs(ino)
        if ino is not None:
            self.inodes.discard(ino)

    def legible(self, parent: InodeNo, after: InodeNo, limit: int) -> list[tuple[InodeNo, bytes]]:
        """Return those of the next *limit* rows of a listing that can be read.

        Goes on until there is at least one, or no more.
        """
        prefix = child_key(parent, InodeNo(0))[:-8]
        found: list[tuple[InodeNo, bytes]] = []
        for rows in self._index.walk(prefix, limit, after=child_key(parent, after)):
            for child, raw in rows:
                try:
                    found.append((parse_child_key(child)[1], unseal(child, raw)))
                except Damaged:
                    self.misses += 1
            if found:
                break
        return found
