"""What the pool's parts need of those above them, as constructors take it: two ports.

``Room`` is the engine, which has blocks go when room is needed; ``Kernel`` is the mount, which the
kernel hears from. Nothing else is called upwards (docs/architecture.md draws it).
"""

from typing import Protocol

from kvfs.core.types import BackingId, InodeNo
from kvfs.pool.open_inodes import OpenInode


class Room(Protocol):
    """Who makes room: knows which blocks may go, and lets them go."""

    def evict(self, size_bytes: int) -> int:
        """Evict so many bytes' worth, if it can; return how many are on their way back."""

    def evict_names(self) -> None:
        """Evict blocks for their names, if it can: the index takes no more of them."""

    def forget_nameless(self) -> None:
        """Give up finished drafts that lost their name, and old versions: room is needed."""

    def top_up(self) -> None:
        """Make room ahead of the next draft as soon as no request waits."""

    def rank_anew(self) -> None:
        """Look every block's rank up again: a policy changed for many of them."""


class Kernel(Protocol):
    """Who tells the kernel, and knows how it reaches the bytes."""

    @property
    def writers_run_free(self) -> bool:
        """Whether writers may allocate without asking (passthrough)."""

    def adopt(self, ino: InodeNo) -> BackingId:
        """Register a fresh extent; 0 where that is not needed. Raises OSError."""

    def abandon(self, backing_id: BackingId) -> None:
        """Take back what ``adopt`` gave: nobody uses it."""

    def freed(self, opened: OpenInode) -> None:
        """The inode's last handle is closed; its extent may go after this."""

    def unnamed(self, ino: InodeNo) -> None:
        """Inode *ino* lost its name: a backing id would hold on to its space."""

    def name_vanished(self, parent: InodeNo, name: bytes) -> None:
        """kvfs itself took *name* away, or somebody else sees it now; the inode may be open."""

    def inode_vanished(self, ino: InodeNo, parent: InodeNo) -> None:
        """kvfs itself let *ino* go, which nobody has open, out of directory *parent*."""
