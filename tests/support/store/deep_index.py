"""An index in which each directory stands in the one before, and whose reads are counted.

It is for what must go up a tree in a bounded number of steps, or once; nothing is on a disk.
"""

import stat

from kvfs.core.inode_rules import blank_record
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.storage.index import Index


class DeepIndex(Index):
    """The directory of number N stands in that of number N - 1; the root is number 1."""

    def __init__(self, name: bytes = b"d") -> None:
        """Each directory is called *name*."""
        self.reads = 0
        self._name = name

    def inode_or_miss(self, ino: InodeNo) -> InodeRecord:
        self.reads += 1
        name = b"" if ino == ROOT_INODE else self._name
        return blank_record(InodeNo(max(1, ino - 1)), name, stat.S_IFDIR | 0o755, 0, 0, 0)

    def xattr(self, ino: InodeNo, name: bytes) -> bytes | None:
        """No directory has any."""
        return None
