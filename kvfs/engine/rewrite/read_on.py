"""Old versions of rewritten blocks that are still read, and how much of the pool they may hold.

O_TRUNC gives the name to a fresh inode, so that readers keep the old bytes whole. Where XFS has one
version of a file, a pool then has as many as are read. A program that keeps a descriptor of each
could hold all of the pool, and others would get ENOSPC. So old versions are charged to the owner of
the block, whose blocks are not rewritten while they are read once it is over its share. A block
that was unlinked, or replaced by a rename, keeps its space while it is read on XFS, too, and is not
counted.
"""

from collections.abc import Mapping
from typing import Final

from kvfs.core.types import InodeNo
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool


class ReadOn:
    """The old versions of one pool. A server that takes the mount over counts anew."""

    def __init__(self, pool: Pool) -> None:
        self._pool: Final = pool
        #: The owner (uid) of each old version that may still be read.
        self._owners: dict[InodeNo, int] = {}

    def note(self, ino: InodeNo, uid: int) -> None:
        """Count *ino*, a block of user *uid* that has just lost its name to a new version."""
        self._owners[ino] = uid

    def held_bytes(self, own: Mapping[OpenInode, int]) -> dict[int, int]:
        """Return the bytes that old versions hold for readers, by owner.

        *own* counts the handles by which this process itself keeps some of them open.
        """
        pool, held = self._pool, dict[int, int]()
        for ino, uid in list(self._owners.items()):
            opened = pool.open_inodes.get(ino)
            if opened is not None and opened.gone is not None:
                if opened.readers > own.get(opened, 0):
                    held[uid] = held.get(uid, 0) + opened.allocated_bytes
            elif ino not in pool.recently_removed:  # which can be opened for a moment
                del self._owners[ino]
        return held

    def is_over(self, uid: int, own: Mapping[OpenInode, int]) -> bool:
        """Whether all old versions hold more than they may, and *uid*'s more than an equal part."""
        held = self.held_bytes(own)
        pool = self._pool
        bound_bytes = pool.settings.old_versions_share * pool.space.usable_bytes
        return sum(held.values()) > bound_bytes and held.get(uid, 0) > bound_bytes / len(held)
