"""What the engine tells the kernel, and how the kernel reaches the bytes: the engine's one port up.

It starts the store, which is told of this port only; what hears of vanished names and freed inodes
(backing ids, the shared handles of readers) is made on that store.
"""

from collections.abc import Callable

import trio

from kvfs.core.settings import Settings
from kvfs.core.types import BackingId, InodeNo
from kvfs.engine.store import Store
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.ports import Kernel
from mount.files.data_path import DaemonPath, DataPath, PassthroughPath
from mount.files.handles import Handles
from mount.files.path_choice import NOT_OFFERED, choose_path, without_passthrough
from mount.files.shared_handles import SharedHandles
from mount.fuse.init_reply import Features, agree
from mount.fuse.invalidations import Invalidations


class KernelPort:
    """The store of one mount and the kernel's side of it; implements ``ports.Kernel``."""

    def __init__(
        self,
        fuse_fd: int,
        settings: Settings,
        handles: Handles,
        start: Callable[[Kernel], Store],
    ) -> None:
        """Raises ToolMissing, and what *start* raises."""
        self.fuse_fd = fuse_fd
        self._wanted = settings.data_path
        self.choice = choose_path(settings.data_path)
        self.writers_run_free = self.choice.passthrough
        self.handles = handles
        self.invalidations = Invalidations(fuse_fd, tells=settings.notifications)
        #: Set when the first file may be opened.
        self.agreed = trio.Event()
        self.store = start(self)
        pool, ids_max = self.store.pool, settings.backing_ids_max
        self.readers = SharedHandles(pool, handles, ids_max, self.store.blocks.served)
        self.path: DataPath = DaemonPath()
        if self.choice.passthrough:
            self.path = PassthroughPath(pool, fuse_fd, ids_max, self.readers.give_up_one)

    # ---- what the engine tells ----

    def adopt(self, ino: InodeNo) -> BackingId:
        """Register a fresh extent. Raises OSError."""
        return self.path.adopt(ino)

    def abandon(self, backing_id: BackingId) -> None:
        """Give back an id that no inode uses."""
        self.path.abandon(backing_id)

    def freed(self, opened: OpenInode) -> None:
        """The inode's last handle is gone."""
        self.path.freed(opened)

    def unnamed(self, ino: InodeNo) -> None:
        """Let go of what would hold on to the space of *ino*, which lost its name."""
        self.readers.forget(ino)
        self.path.forget(ino)

    def name_vanished(self, parent: InodeNo, name: bytes) -> None:
        """Have the kernel forget *name*."""
        self.invalidations.entry_vanished(parent, name)

    def inode_vanished(self, ino: InodeNo, parent: InodeNo) -> None:
        """Have the kernel ask again for *ino* and its directory."""
        self.invalidations.inode_vanished(ino, parent)

    # ---- what is agreed with the kernel before the first file is opened ----

    def features(self, offered: int) -> Features:
        """Return what to agree on, of the flags that the kernel has *offered*."""
        return agree(offered, passthrough=self.choice.passthrough)

    def begin(self, features: Features) -> None:
        """Try passthrough for real before the first file is opened; else take the daemon path.

        Raises ToolMissing when passthrough was demanded.
        """
        if isinstance(self.path, PassthroughPath):
            obstacle = self.path.obstacle() if features.passthrough else NOT_OFFERED
            if obstacle is not None:
                self.choice = without_passthrough(self._wanted, obstacle)
                self.path.disconnect()
                self.path = DaemonPath()
                self.writers_run_free = False
        self.agreed.set()
