"""The kernel's side of a store that has none: notes what it is told, and gives no backing ids."""

from collections.abc import Callable

from kvfs.core.types import BackingId, InodeNo
from kvfs.pool.open.open_inodes import OpenInode


class KernelRecorder:
    """Implements ``kvfs.pool.open.ports.Kernel``."""

    def __init__(self, adopt: Callable[[int], BackingId] = lambda _fd: BackingId(0)) -> None:
        self.writers_run_free = False
        self.adopt = adopt
        self.abandoned: list[BackingId] = []
        #: Names that vanished, and inodes.
        self.names: list[bytes] = []
        self.inodes: list[InodeNo] = []
        self.corrected: list[InodeNo] = []

    def abandon(self, backing_id: BackingId) -> None:
        """Note an id that came back."""
        self.abandoned.append(backing_id)

    def freed(self, opened: OpenInode) -> None:
        """Keep nothing of a closed inode."""

    def unnamed(self, ino: InodeNo) -> None:
        """Hold on to nothing without a name."""

    def name_vanished(self, _parent: InodeNo, name: bytes) -> None:
        """Note a name."""
        self.names.append(name)

    def attributes_corrected(self, ino: InodeNo) -> None:
        """Note an inode whose attributes changed."""
        self.corrected.append(ino)

    def inode_vanished(self, ino: InodeNo, _parent: InodeNo) -> None:
        """Note an inode."""
        self.inodes.append(ino)
