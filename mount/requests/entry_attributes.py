"""Records as the kernel wants them: pyfuse3's EntryAttributes, with the right timeouts."""

import stat
from typing import Final

import pyfuse3

from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.settings import Settings
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, STAT_BLOCK_BYTES, InodeNo, InodeRecord

#: A field of 32 bits in struct fuse_attr.
_LINKS_MAX: Final = (1 << 32) - 1


def link_count(record: InodeRecord) -> int:
    """Return st_nlink of an inode that has its name: directories count their subdirectories."""
    return min(2 + record.subdirs, _LINKS_MAX) if stat.S_ISDIR(record.mode) else 1


#: may_open() in fs/namei.c wants attributes right behind a CREATE; with a timeout of 0 each store
#: would ask once more. What a write changes the kernel forgets by itself.
CREATED_S: Final = 1.0


class Entries:
    """Builds replies about inodes."""

    def __init__(self, settings: Settings, generation: int) -> None:
        """*generation* is the pool's epoch: an NFS handle of another pool is stale.

        The root's is 0: the kernel warns of any other (fuse_lookup_name in fs/fuse/dir.c).
        """
        self.settings = settings
        self._generation = generation & 0xFFFFFFFF
        self._negative = pyfuse3.EntryAttributes()

    def entry(
        self,
        ino: InodeNo,
        record: InodeRecord,
        *,
        nlink: int = -1,
        settled: bool = True,
        name_trusted: bool = True,
    ) -> pyfuse3.EntryAttributes:
        """Return *record*'s attributes; not *settled* (somebody writes): the kernel asks again.

        It asks again for a name that is not *name_trusted*, too.
        """
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = ino
        entry.generation = 0 if ino == ROOT_INODE else self._generation
        entry.st_mode = record.mode
        entry.st_nlink = link_count(record) if nlink < 0 else nlink
        entry.st_uid = record.uid
        entry.st_gid = record.gid
        entry.st_size = record.size_bytes
        entry.st_blksize = PAGE_BYTES
        entry.st_blocks = record.allocated_bytes // STAT_BLOCK_BYTES
        entry.st_atime_ns = record.atime_ns
        entry.st_mtime_ns = record.mtime_ns
        entry.st_ctime_ns = record.ctime_ns
        entry.entry_timeout = self.settings.entry_timeout_s if name_trusted else 0
        if settled and record.state not in UNFINISHED:
            entry.attr_timeout = self.settings.attr_timeout_s
        else:
            entry.attr_timeout = 0
        return entry

    def created(
        self, ino: InodeNo, record: InodeRecord, *, name_trusted: bool
    ) -> pyfuse3.EntryAttributes:
        """Return a new draft's attributes, which open(2) checks once more before it returns."""
        entry = self.entry(ino, record, settled=False, name_trusted=name_trusted)
        entry.attr_timeout = CREATED_S
        return entry

    def hidden(self) -> pyfuse3.EntryAttributes:
        """Return "no such name" about a draft: never remembered, or its writer would be told so."""
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = 0
        entry.entry_timeout = 0
        return entry

    def absent(self) -> pyfuse3.EntryAttributes:
        """Return "no such name", which the kernel remembers for a bounded while."""
        self._negative.st_ino = 0
        self._negative.entry_timeout = self.settings.negative_timeout_s
        return self._negative
