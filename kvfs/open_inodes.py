"""What is open: for each open inode its extent's descriptor and who holds it.

An inode is here from its first handle to its last. A removed inode lives on here (``gone``) until
then, because a handle must go on reading its bytes and attributes.
"""

from kvfs.types import InodeNo, InodeRecord


class OpenInode:
    """One open inode. ``fd`` is its extent, -1 for a directory or while nobody needed it."""

    __slots__ = ("allocated_bytes", "created_in", "fd", "gone", "ino", "readers", "writers")

    def __init__(self, ino: InodeNo, allocated_bytes: int = 0) -> None:
        self.ino = ino
        self.fd = -1
        self.readers = 0
        self.writers = 0
        #: What the extent held when last looked at; the index learns it at the last close.
        self.allocated_bytes = allocated_bytes
        #: The directory a draft was created in, whose demand it tells; 0 for the rest.
        self.created_in = InodeNo(0)
        #: The last record of an inode that has no name any more.
        self.gone: InodeRecord | None = None


class OpenInodes(dict[InodeNo, OpenInode]):
    """All open inodes by number."""

    def enter(self, ino: InodeNo, *, writer: bool) -> OpenInode:
        """Count one more handle on *ino*."""
        opened = self.get(ino)
        if opened is None:
            opened = self[ino] = OpenInode(ino)
        if writer:
            opened.writers += 1
        else:
            opened.readers += 1
        return opened

    def leave(self, opened: OpenInode, *, writer: bool) -> bool:
        """Count one handle less; True when it was the last, and the inode left the table."""
        if writer:
            opened.writers -= 1
        else:
            opened.readers -= 1
        assert opened.writers >= 0 <= opened.readers, "a handle was closed twice"
        if opened.writers or opened.readers:
            return False
        del self[opened.ino]
        return True
