"""Old versions of rewritten blocks that somebody reads on, and how much of the pool they may hold.

O_TRUNC gives the name to a fresh inode, so that readers keep the old bytes whole. Where XFS has one
version of a file, a pool then has as many as are read. A program that keeps a descriptor of each
would hold all of the pool, and others would get ENOSPC. So they count as held by the owner of the
block, and over a share its readers' blocks are not rewritten. What was unlinked or replaced by a
rename while it was read is on XFS the same, and is not counted.
"""

from collections.abc import Mapping
from typing import Final

from kvfs.core.types import InodeNo
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool


class ReadOn:
    """The old versions of one pool. A server that takes the mount over counts anew."""

    def __init__(self, pool: Pool) -> None:
        self._pool: Final = pool
        #: The owner of each that may still be read.
        self._owners: dict[InodeNo, int] = {}

    def note(self, ino: InodeNo, uid: int) -> None:
        """Count *ino*, a block of user *uid* that has just lost its name to a new version."""
        self._owners[ino] = uid

    def held_bytes(self, own: Mapping[OpenInode, int]) -> dict[int, int]:
        """Return what they hold for readers, by owner.

        *own* has how often this process has some of them open itself, for what is still to come.
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
        """Whether user *uid* has more than an equal share of what all may hold, and all do."""
        held = self.held_bytes(own)
        pool = self._pool
        bound_bytes = pool.settings.old_versions_share * pool.space.usable_bytes
        return sum(held.values()) > bound_bytes and held.get(uid, 0) > bound_bytes / len(held)
