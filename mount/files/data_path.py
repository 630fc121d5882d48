"""The two data paths: bytes through this process, or kernel to kernel (FUSE passthrough).

The rules of Linux's passthrough (fs/fuse/iomode.c): while an inode is open in one mode the other
one is refused with EIO, and all its handles share one backing id. Which path a mount uses is
decided here, too, and how far the kernel reads ahead on it.
"""

import contextlib
import errno
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from kvfs.core.errors import Damaged, ToolMissing
from kvfs.core.pool_layout import INODES
from kvfs.core.types import NO_BACKING_ID, BackingId, InodeNo
from kvfs.devices import Device
from kvfs.doctor.machine_rules import READ_AHEAD_WANTED_BYTES
from kvfs.machine.mount_table import kvfs_at
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.outliving import Notes
from mount.fuse import kernel
from mount.fuse.wire import (
    FOPEN_DIRECT_IO,
    FOPEN_KEEP_CACHE,
    FOPEN_NOFLUSH,
    FOPEN_PASSTHROUGH,
    Grant,
)

_log: Final = logging.getLogger(__name__)

#: FUSE passthrough came with this release (fs/fuse/passthrough.c).
_RELEASE_MIN: Final = (6, 9)
#: Documentation/ABI/testing/sysfs-class-bdi in the kernel's sources.
_READ_AHEAD: Final = "/sys/class/bdi/{device}/read_ahead_kb"
NOT_OFFERED: Final = "the kernel was built without CONFIG_FUSE_PASSTHROUGH"
_THROUGH_DAEMON: Final = Grant(FOPEN_KEEP_CACHE, NO_BACKING_ID)
_ASKING: Final = Grant(FOPEN_DIRECT_IO, NO_BACKING_ID)
_WRITING: Final = FOPEN_PASSTHROUGH
_READING: Final = FOPEN_PASSTHROUGH | FOPEN_NOFLUSH
_ID_NOTES: Final = b"id/"


class PathChoice(NamedTuple):
    """The path taken and the reason in words, for `kvfs status`."""

    passthrough: bool
    reason: str


def choose_path(wanted: str) -> PathChoice:
    """Choose by the setting *wanted* and by what the kernel's release can do.

    Raises ToolMissing when passthrough was demanded and is not available.
    """
    if wanted == "daemon":
        return PathChoice(passthrough=False, reason="asked for by the setting data_path")
    release = os.uname().release
    if _version(release) < _RELEASE_MIN:
        return without_passthrough(wanted, f"Linux {release} does not have it, 6.9 and later do")
    return PathChoice(passthrough=True, reason="the kernel and the backing file system allow it")


def without_passthrough(wanted: str, obstacle: str) -> PathChoice:
    """Return the daemon path, due to *obstacle*. Raises ToolMissing if *wanted* forbids it."""
    if wanted == "passthrough":
        raise ToolMissing(
            f"passthrough is not available: {obstacle}; --data-path=auto works without it"
        )
    return PathChoice(passthrough=False, reason=f"no passthrough: {obstacle}")


def backing_obstacle(error: OSError) -> str:
    """Return what a refused backing id means (fuse_backing_open in fs/fuse/backing.c)."""
    if error.errno == errno.EPERM:
        return "the server has no CAP_SYS_ADMIN"
    if error.errno == errno.ELOOP:
        return "the backing file system is stacked itself (overlayfs)"
    if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
        return NOT_OFFERED
    return os.strerror(error.errno or 0)


def read_ahead_far(mountpoint: str) -> None:
    """Have the kernel read ahead far in the mount at *mountpoint*, if we are allowed to set it.

    For the daemon path: by itself the kernel asks for 128 KiB at a time (VM_READAHEAD_PAGES), and
    INIT can only lower that. Several READs of 1 MiB are wanted.
    """
    mount = kvfs_at(mountpoint)
    if mount is None:
        return  # gone already, or another has come above it
    try:
        with open(_READ_AHEAD.format(device=mount.device), "w", encoding="ascii") as setting:
            setting.write(str(READ_AHEAD_WANTED_BYTES >> 10))
    except OSError as error:
        _log.info("kernel read-ahead not raised: %s", error)


def _version(release: str) -> tuple[int, int]:
    """Return (major, minor) of a kernel release; (0, 0) if it has another form."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _note_of(backing_id: BackingId) -> bytes:
    return _ID_NOTES + backing_id.to_bytes(4, "little")


def _path_of(fd: int) -> int:
    """Return an O_PATH descriptor of the file behind *fd*; the device is not asked.

    The kernel keeps what is registered: a file open for writing would count as a user of the extent
    for as long as the id lives (Extents.in_use).
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)


class DataPath(Protocol):
    """How the kernel reaches the bytes of an open file."""

    name: str
    #: Whether a file open for reading costs this process a descriptor, too.
    holds_readers: bool

    def grant(self, opened: OpenInode, *, writer: bool, asks: bool = False) -> Grant:
        """Decide for a new handle on *opened*; *asks*: not passthrough, if possible."""

    def prepare(self, ino: InodeNo) -> None:
        """Ask for what a grant for a reader of *ino* needs. Raises NotAtHand, OSError."""

    def freed(self, opened: OpenInode) -> None:
        """Learn that the inode's last handle is gone."""

    def describe(self) -> dict[str, int]:
        """Return figures for `kvfs status`."""

    def adopt(self, fd: int) -> BackingId:
        """Register the fresh extent behind *fd*; 0 says that it needs no id. Raises OSError."""

    def abandon(self, backing_id: BackingId) -> None:
        """Give an id back that no inode uses."""

    def forget(self, ino: InodeNo) -> None:
        """Let go of what holds the space of *ino*, which lost its name."""

    def disconnect(self) -> None:
        """Give back what the connection to the kernel holds, as it ends."""

    def recall(self, ids: Mapping[InodeNo, BackingId]) -> None:
        """Take over the *ids* of open inodes from another server; give its other ids back."""

    def granted(self, backing_id: BackingId, *, writer: bool) -> Grant:
        """Return what a handle with *backing_id* was granted."""


class DaemonPath:
    """Reads and writes come to this process; the kernel caches what it read (only kvfs writes)."""

    name = "daemon"
    holds_readers = True

    def grant(self, opened: OpenInode, *, writer: bool, asks: bool = False) -> Grant:
        """Let the kernel keep its cache: nobody else changes the bytes."""
        return _THROUGH_DAEMON

    def prepare(self, _ino: InodeNo) -> None:
        """Do nothing: the first read opens the extent."""

    def adopt(self, _fd: int) -> BackingId:
        """Give no id: the kernel asks this process for the bytes."""
        return NO_BACKING_ID

    def abandon(self, _backing_id: BackingId) -> None:
        """Do nothing: there are no ids."""

    def freed(self, _opened: OpenInode) -> None:
        """Do nothing: no kernel state hangs on a handle."""

    def forget(self, _ino: InodeNo) -> None:
        """Do nothing: no kernel state hangs on a name."""

    def disconnect(self) -> None:
        """Do nothing: the connection holds nothing."""

    def recall(self, _ids: Mapping[InodeNo, BackingId]) -> None:
        """Do nothing: there are no ids."""

    def granted(self, _backing_id: BackingId, *, writer: bool) -> Grant:
        """Return what every handle is granted."""
        return _THROUGH_DAEMON

    def describe(self) -> dict[str, int]:
        """Return no figures."""
        return {}


class PassthroughPath:
    """Every handle gets its extent's backing id; ids of closed inodes are kept for a while.

    Invariant: an open inode's id is never closed, and no inode has two ids.
    """

    name = "passthrough"
    holds_readers = False

    def __init__(
        self,
        device: Device,
        inodes: OpenInodes,
        at_hand: ExtentsAtHand,
        notes: Notes,
        device_fd: int,
        ids_max: int,
        give_up_one: Callable[[], bool],
    ) -> None:
        """*device_fd* is FUSE's. *give_up_one* lets a parked inode go; False when there is none."""
        self._device = device
        self._inodes = inodes
        self._at_hand = at_hand
        self._give_up_one = give_up_one
        self._device_fd = device_fd
        self._ids_max = ids_max
        #: Ids by inode: of open and parked ones (open_inodes.py), and of others that were closed
        #: lately, oldest first.
        self._open: dict[InodeNo, BackingId] = {}
        self._idle: OrderedDict[InodeNo, BackingId] = OrderedDict()
        #: All ids that the kernel has; a note of each is left to the next server.
        self._registered: set[BackingId] = set()
        self._notes = notes
        self.opened_ids = 0
        self.closed_ids = 0

    def adopt(self, fd: int) -> BackingId:
        """Register the fresh extent behind *fd*; 0 once the connection has ended."""
        if self._device_fd < 0:
            return NO_BACKING_ID
        return self._register_path(_path_of(fd))

    def _register_path(self, path_fd: int) -> BackingId:
        """Make an id from *path_fd*, and close that. Raises OSError."""
        self.opened_ids += 1
        try:
            backing_id = kernel.open_backing(self._device_fd, path_fd)
        finally:
            os.close(path_fd)
        self._registered.add(backing_id)
        self._notes.put(_note_of(backing_id), True)
        return backing_id

    def abandon(self, backing_id: BackingId) -> None:
        """Give an id back that no inode uses."""
        self.closed_ids += 1
        if self._device_fd < 0:
            return
        self._registered.discard(backing_id)
        kernel.close_backing(self._device_fd, backing_id)
        self._notes.drop(_note_of(backing_id))

    def recall(self, ids: Mapping[InodeNo, BackingId]) -> None:
        """Take over the *ids* of open inodes from another server; give its other ids back.

        That server may have been killed after it got an id and before it noted it. The kernel
        counts ids upwards (idr_alloc_cyclic), so that is the one before the next id it gives.
        """
        self._open.update(ids)
        self._registered.update(ids.values())
        noted = {int.from_bytes(key, "little") for key in self._notes.below(_ID_NOTES)}
        with contextlib.suppress(OSError):
            unused = self._try_one()
            noted |= {unused - 1, unused}
        for backing_id in noted - self._registered:
            with contextlib.suppress(OSError):
                kernel.close_backing(self._device_fd, BackingId(backing_id))
            self._notes.drop(_note_of(BackingId(backing_id)))

    def granted(self, backing_id: BackingId, *, writer: bool) -> Grant:
        """Return what a handle with *backing_id* was granted."""
        if not backing_id:
            return _ASKING
        return Grant(_WRITING if writer else _READING, backing_id)

    def obstacle(self) -> str | None:
        """Register and give back one file of the pool; return why that failed, None if it works."""
        try:
            kernel.close_backing(self._device_fd, self._try_one())
        except OSError as error:
            return backing_obstacle(error)
        return None

    def _try_one(self) -> BackingId:
        """Register some file of the pool. Raises OSError."""
        # Any regular file on the backing file system will do.
        fd = os.open(INODES, os.O_PATH | os.O_CLOEXEC, dir_fd=self._device.home.pool_fd)
        try:
            return kernel.open_backing(self._device_fd, fd)
        finally:
            os.close(fd)

    def disconnect(self) -> None:
        """Give all ids back, and forget the connection.

        A client with a file open keeps even a dead connection alive, and with it every extent that
        has an id.
        """
        for backing_id in self._registered:
            with contextlib.suppress(OSError):
                kernel.close_backing(self._device_fd, backing_id)
        self._registered.clear()
        self._device_fd = -1

    def grant(self, opened: OpenInode, *, writer: bool, asks: bool = False) -> Grant:
        """Return the inode's one backing id. Raises OSError, Damaged.

        A draft whose writes must ask for space has none until its last close. It gets direct I/O: a
        file in the kernel's page cache could not be opened for passthrough (iomode.c). So does a
        handle that *asks*, unless the inode is on passthrough already, which rules out all else.
        """
        known = self._open.get(opened.ino)
        if opened.through_daemon or (asks and known is None):
            return _ASKING
        if known is None:
            known = self._owned(opened) or self._register(opened)
            self._open[opened.ino] = known
            self._bound()
        served = opened.served_writers
        if writer and opened.writers == served + 1 and (served or not opened.created_in):
            # The kernel does not notice stores through a mapping, and would go on showing the old
            # mtime. From now on it asks us, until the last writer has closed. For files that only
            # file servers write it may cache the mtime briefly (Answers.entry), but this is another
            # writer.
            with contextlib.suppress(OSError):  # it may not know the inode
                kernel.notify_inval_inode(self._device_fd, opened.ino)
        return Grant(_WRITING if writer else _READING, known)

    def prepare(self, ino: InodeNo) -> None:
        """Ask for the extent that the grant registers, before a reader is counted."""
        if ino in self._open or ino in self._idle:
            return
        opened = self._inodes.get(ino)
        if opened is not None and (opened.fd >= 0 or opened.fresh_id or opened.through_daemon):
            return
        with contextlib.suppress(Damaged):  # the open finds out, and makes it a miss
            self._at_hand.require(ino)

    def _owned(self, opened: OpenInode) -> BackingId:
        """Return the id that came with a fresh extent, or was kept since the last close, or 0."""
        return opened.take_fresh_id() or self._idle.pop(opened.ino, NO_BACKING_ID)

    def _register(self, opened: OpenInode) -> BackingId:
        if opened.fd >= 0:  # perhaps its name is gone
            path_fd = _path_of(opened.fd)
        else:
            path_fd = self._at_hand.open(opened.ino, os.O_PATH)
        return self._register_path(path_fd)

    def freed(self, opened: OpenInode) -> None:
        """Keep the id of a closed inode for its next opener, unless the inode is gone."""
        backing_id = self._open.pop(opened.ino, NO_BACKING_ID) or self._owned(opened)
        if not backing_id:
            return
        if opened.gone is not None:
            self.abandon(backing_id)
            return
        self._idle[opened.ino] = backing_id
        self._bound()

    def _bound(self) -> None:
        """Give back the ids closed longest ago; ids of open inodes stay, however many there are."""
        while len(self._idle) + len(self._open) > self._ids_max:
            if self._idle:
                _, oldest = self._idle.popitem(last=False)
                self.abandon(oldest)
            elif not self._give_up_one():
                return

    def forget(self, ino: InodeNo) -> None:
        """Drop the id of a closed inode that lost its name: it pins the extent's blocks."""
        backing_id = self._idle.pop(ino, NO_BACKING_ID)
        if backing_id:
            self.abandon(backing_id)

    def describe(self) -> dict[str, int]:
        """Return how many ids are registered."""
        parked = len(self._inodes.parked)
        return {
            "backing_ids_open": len(self._open) - parked,
            "backing_ids_cached": len(self._idle) + parked,
        }
