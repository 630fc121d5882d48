"""What the engine tells the kernel, and how the kernel reaches the bytes: the engine's one port up.

It starts the store, which knows this port only. Then it makes, on that store, the parts that it
tells of vanished names and freed inodes: backing ids, shared handles of readers.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Final, NamedTuple

import trio

from kvfs.core.errors import ServeFailed, ToolMissing
from kvfs.core.settings import Settings
from kvfs.core.types import BackingId, InodeNo
from kvfs.devices import Device
from kvfs.engine.recovery.rebuild import Progress
from kvfs.engine.store import Store
from kvfs.machine.hardware import DEFAULT_REQUEST_TIMEOUT, sysctl
from kvfs.machine.mount_table import FUSE_DEVICE
from kvfs.machine.process_limits import accounts_of
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.ports import Kernel
from mount.files.data_path import (
    NOT_OFFERED,
    DaemonPath,
    DataPath,
    PassthroughPath,
    PathChoice,
    choose_path,
    without_passthrough,
)
from mount.files.handles import Handles, OpenShares, Recalled
from mount.files.held_shares import HeldShares
from mount.files.shared_handles import SharedHandles
from mount.fuse import kernel
from mount.fuse.init_reply import Features, agree
from mount.fuse.kernel import Invalidations
from mount.process.succession import Succession

_log: Final = logging.getLogger(__name__)
_INIT_NOTE: Final = b"init"
#: That the mount may be cloned with mapped ids: the kernel keeps that, whatever the setting is now.
_IDMAPPED_NOTE: Final = b"idmapped"


class Agreed(NamedTuple):
    """What a first server agreed on with the kernel at INIT, noted for those that take over.

    ``request`` is the whole INIT of the kernel; ``reason`` is that of the data path taken.
    """

    request: bytes
    passthrough: bool
    reason: str


class KernelPort:
    """The store of one mount and the kernel's side of it; implements ``ports.Kernel``."""

    def __init__(
        self,
        fuse_fd: int,
        settings: Settings,
        handles: Handles,
        start: Callable[[Kernel], Store],
        agreed_before: Agreed | None = None,
    ) -> None:
        """Raises ToolMissing, and what *start* raises.

        *agreed_before*: what another server has agreed on with the kernel; None: this is the first.
        """
        self.fuse_fd = fuse_fd
        self._wanted = settings.data_path
        self._wants_idmapped = settings.idmapped_mounts
        #: Whether requests name no user, but those that make something; known with INIT.
        self.idmapped = False
        self.agreed_before = agreed_before
        self.choice = choose_path(settings.data_path)
        if self.agreed_before is not None:
            passthrough, reason = self.agreed_before.passthrough, self.agreed_before.reason
            self.choice = PathChoice(passthrough, reason)
        #: Whether another server could go on with this mount; None: not known yet.
        self.resends: bool | None = None
        self.writers_run_free = self.choice.passthrough
        self.handles = handles
        self.invalidations = Invalidations(fuse_fd, tells=settings.notifications)
        #: Set when the first file may be opened.
        self.agreed = trio.Event()
        self.store = start(self)
        pool, ids_max = self.store.pool, settings.backing_ids_max
        self.readers = SharedHandles(
            *(pool, handles, ids_max, self.store.blocks.served),
            *(self.store.namespace.proofs, self.store.read_ahead),
        )
        self.held = HeldShares(
            *(pool.space.accounts, handles, pool.rules.leases, pool.rules.heat),
            *(pool.rules.tenants, pool.space.taken, pool.monotonic_s),
        )
        self.path: DataPath = DaemonPath()
        if self.choice.passthrough:
            self.path = PassthroughPath(
                *(pool.device, pool.open.inodes, pool.at_hand, pool.notes),
                *(fuse_fd, ids_max, self.readers.give_up_one),
            )
        #: The handles that clients have from before.
        self.recalled: Recalled | None = None
        if self.agreed_before is not None:
            self.idmapped = bool(self.store.pool.notes.get(_IDMAPPED_NOTE))
            self.store.take_over(handles.living())
            self.recalled = handles.recall(pool.open.inodes)
            ids = {
                handle.opened.ino: handle.backing_id
                for handle in self.recalled.handles
                if handle.backing_id
            }
            self.path.recall(ids)

    # ---- what the engine tells ----

    def adopt(self, fd: int) -> BackingId:
        """Register the fresh extent behind *fd*. Raises OSError."""
        return self.path.adopt(fd)

    def abandon(self, backing_id: BackingId) -> None:
        """Give back an id that no inode uses."""
        self.path.abandon(backing_id)

    def freed(self, opened: OpenInode) -> None:
        """Tell the data path that the inode's last handle is gone."""
        self.path.freed(opened)

    def unnamed(self, ino: InodeNo) -> None:
        """Let go of what would hold on to the space of *ino*, which lost its name."""
        self.readers.forget(ino)
        self.path.forget(ino)

    def name_vanished(self, parent: InodeNo, name: bytes) -> None:
        """Have the kernel forget *name*."""
        self.invalidations.entry_vanished(parent, name)

    def inode_vanished(self, ino: InodeNo, parent: InodeNo) -> None:
        """Have the kernel fetch the attributes of *ino* and its directory anew."""
        self.invalidations.inode_vanished(ino, parent)

    def attributes_corrected(self, ino: InodeNo) -> None:
        """Have the kernel fetch the attributes of *ino* anew."""
        self.invalidations.attributes_corrected(ino)

    # ---- what is agreed with the kernel before the first file is opened ----

    def features(self, offered: int, request: bytes) -> Features:
        """Return what to agree on, of the flags that the kernel *offered* in its *request*."""
        features = agree(
            offered,
            passthrough=self.choice.passthrough,
            idmapped=self._wants_idmapped,
            limited=bool(sysctl(DEFAULT_REQUEST_TIMEOUT)),
        )
        self._request = request
        return features

    def begin(self, features: Features) -> None:
        """Try passthrough for real before the first file is opened; else take the daemon path.

        Raises ToolMissing when passthrough or id-mapped mounts were demanded.
        """
        self.resends = features.resend
        if self.agreed_before is None:
            if self._wants_idmapped and not features.idmapped:
                raise ToolMissing(
                    f"idmapped_mounts needs Linux 6.12 or later, and this is {os.uname().release}"
                )
            self._choose(features)
            self.idmapped = features.idmapped
            self.store.pool.notes.put(_IDMAPPED_NOTE, self.idmapped)
            self.store.pool.notes.put(_INIT_NOTE, (self._request, *self.choice))
        self.agreed.set()

    def _choose(self, features: Features) -> None:
        if isinstance(self.path, PassthroughPath):
            obstacle = self.path.obstacle() if features.passthrough else NOT_OFFERED
            if obstacle is not None:
                self.choice = without_passthrough(self._wanted, obstacle)
                self.path.disconnect()
                self.path = DaemonPath()
                self.writers_run_free = False


def open_port(
    device: Device, settings: Settings, of: Succession, progress: Progress | None
) -> KernelPort:
    """Open /dev/fuse and bring the store up that will answer there. Raises CommandError."""
    try:
        fuse_fd = of.fuse_fd if of.takes_over else kernel.open_device()
    except OSError as error:
        raise ServeFailed(
            f"{FUSE_DEVICE}: {error.strerror}; load the fuse module (modprobe fuse)"
        ) from error
    try:
        accounts, remarks = accounts_of(settings)
        for remark in remarks:  # a first server would not have started
            _log.warning("%s", remark)
        share = settings.open_files_user_share
        shares = OpenShares(accounts.open_files, share, settings.ready_extents_max)
        handles = Handles(of.handles_fd, shares)
        living = handles.living() if of.takes_over else None
        start = functools.partial(
            Store,
            device,
            settings,
            progress=progress,
            outliving=of.outliving,
            living=living,
            accounts=accounts,
        )
        noted = of.notes.get(_INIT_NOTE) if of.takes_over else None
        agreed_before = None if noted is None else Agreed(*noted)
        return KernelPort(fuse_fd, settings, handles, start, agreed_before)
    except BaseException:
        os.close(fuse_fd)
        raise
