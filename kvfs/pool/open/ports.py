"""Three ports: what the parts of the pool need of parts above them, passed to them.

``Room`` is implemented by the engine, which evicts when space is needed, and ``Kernel`` by the
mount, which talks to the kernel. ``Closes`` is implemented by the engine's last closes, for a
rename. There are no other upward calls (see docs/dev/architecture.md).
"""

from typing import Protocol

from kvfs.core.types import BackingId, InodeNo, InodeRecord
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.space.drive import PoolDrive


class Room(Protocol):
    """Makes space by evicting blocks."""

    def evict(self, size_bytes: int, drive: PoolDrive) -> int:
        """Evict *size_bytes* on *drive*, if possible; return how many are being freed there."""

    def evict_names(self) -> None:
        """Evict blocks for their names, if possible, because the index takes no more names."""

    def nameless_bytes(self, drive: PoolDrive) -> int:
        """Return how many bytes ``forget_nameless`` would free on *drive*."""

    @property
    def all_known(self) -> bool:
        """Whether the scan after the start has found all blocks that may be evicted."""

    def forget_nameless(self) -> None:
        """Give up finished drafts that lost their name, and old versions, to make space."""

    def top_up(self) -> None:
        """Make space for the next draft ahead of time, as soon as no request waits."""

    def rank_anew(self) -> None:
        """Rank every block again, because a policy changed for many of them."""


class Closes(Protocol):
    """Closes of drafts that wait for their rename."""

    def closed(self, opened: OpenInode, record: InodeRecord) -> InodeRecord | None:
        """Return what the close of *opened* that waits makes of *record*; None: none waits."""

    def published(self, opened: OpenInode, growth_bytes: int) -> None:
        """Note that the rename has published *opened*, which takes *growth_bytes* more now."""


class Kernel(Protocol):
    """Talks to the kernel, and to the data path (passthrough or daemon)."""

    @property
    def writers_run_free(self) -> bool:
        """Whether writers may allocate without asking (passthrough)."""

    def adopt(self, fd: int) -> BackingId:
        """Register the new extent behind *fd*; return its backing id, 0 if it needs none.

        Raises OSError.
        """

    def abandon(self, backing_id: BackingId) -> None:
        """Give back *backing_id*, which ``adopt`` returned and nobody uses."""

    def freed(self, opened: OpenInode) -> None:
        """Note that the inode's last handle is closed; its extent may be unlinked after this."""

    def unnamed(self, ino: InodeNo) -> None:
        """Note that *ino* lost its name; a backing id would keep its space from being freed."""

    def name_vanished(self, parent: InodeNo, name: bytes) -> None:
        """Note that kvfs removed *name*, or changed who can see it; the inode may be open."""

    def inode_vanished(self, ino: InodeNo, parent: InodeNo) -> None:
        """Note that kvfs removed *ino*, which nobody has open, from directory *parent*."""

    def attributes_corrected(self, ino: InodeNo) -> None:
        """Note that *ino* holds another number of bytes than the kernel may have been told."""
