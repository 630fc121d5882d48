"""What a FUSE server does around /dev/fuse: mount, backing ids, and messages that nobody asked for.

Nothing here knows what a block or a handle is. Each function that makes a system call raises
OSError with the kernel's errno. Layouts: linux/include/uapi/linux/fuse.h; measured behaviour:
docs/dev/architecture.md.
"""

import contextlib
import fcntl
import functools
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable
from typing import Final

import trio

from kvfs.core.source_list import listed, sources_of
from kvfs.core.types import BackingId, InodeNo
from kvfs.devices.detached import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    attach,
    mount_detached,
)
from kvfs.machine.mount_table import FS_TYPE, FUSE_DEVICE
from mount.fuse.wire import (
    NOTIFY_INC_EPOCH,
    NOTIFY_INVAL_ENTRY,
    NOTIFY_INVAL_INODE,
    NOTIFY_RESEND,
    OUT_HEADER,
    OUT_HEADER_BYTES,
)

_log: Final = logging.getLogger(__name__)

#: _IOW(229, 1, struct fuse_backing_map): the id is the return value.
_BACKING_OPEN: Final = 0x4010E501
#: _IOW(229, 2, u32).
_BACKING_CLOSE: Final = 0x4004E502
_BACKING_MAP: Final = struct.Struct("<iIQ")
#: The most notifications that wait; more are skipped, which costs a look-up each.
_BACKLOG_MAX: Final = 65_536
#: So long a command waits for the kernel, which a client may hold up, and looks this often.
_CATCH_UP_S: Final = 1.0
_LOOK_S: Final = 0.002
#: fsconfig(2) takes no longer string (strndup_user in fs/fsopen.c), its terminating zero excluded.
_SOURCE_MAX_BYTES: Final = 255
#: Tells the kernel of one name. Raises OSError.
_Telling = Callable[[], None]


def open_device() -> int:
    """Open /dev/fuse and return a non-blocking descriptor that no child inherits."""
    return os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)


def detached(device_fd: int, source: str, *, read_only: bool) -> int:
    """Make a mount that is served on *device_fd* and is on no path yet; return an fd of its root.

    Its type is fuse.kvfs. The kernel checks permissions itself (default_permissions), so that no
    handler has to.
    """
    fs_type, _, subtype = FS_TYPE.partition(".")
    options = {
        "fd": str(device_fd),
        "rootmode": "40000",
        "user_id": "0",
        "group_id": "0",
        "subtype": subtype,
    }
    flags = ["allow_other", "default_permissions", *(["ro"] if read_only else [])]
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (MOUNT_ATTR_RDONLY if read_only else 0)
    return mount_detached(fs_type, _in_mount_table(source), options, flags, attributes)


def _in_mount_table(source: str) -> str:
    """Return what the mount table is to show as *source*: of a long list the first drives."""
    sources = list(sources_of(source))
    while len(os.fsencode(listed(sources))) > _SOURCE_MAX_BYTES and len(sources) > 1:
        sources.pop()
    return listed(sources)


def mount(device_fd: int, mountpoint: str, source: str, *, read_only: bool) -> None:
    """Mount the file system served on *device_fd* at *mountpoint*."""
    root_fd = detached(device_fd, source, read_only=read_only)
    try:
        attach(root_fd, mountpoint)
    finally:
        os.close(root_fd)


def open_backing(device_fd: int, extent_fd: int) -> BackingId:
    """Register *extent_fd* (an O_PATH descriptor will do) as a passthrough target; return its id.

    Raises OSError EPERM without CAP_SYS_ADMIN, ELOOP when the backing file system is stacked
    too deep (overlayfs), EOPNOTSUPP where the kernel has no passthrough.
    """
    # A bytearray is passed by reference; only then does fcntl.ioctl return the call's own value.
    request = bytearray(_BACKING_MAP.pack(extent_fd, 0, 0))
    return BackingId(fcntl.ioctl(device_fd, _BACKING_OPEN, request, True))


def close_backing(device_fd: int, backing_id: BackingId) -> None:
    """Give *backing_id* back; handles that the kernel opened with it stay usable."""
    fcntl.ioctl(device_fd, _BACKING_CLOSE, struct.pack("<I", backing_id))


def _notify(device_fd: int, code: int, payload: bytes) -> None:
    message = OUT_HEADER.pack(OUT_HEADER_BYTES + len(payload), code, 0) + payload
    os.write(device_fd, message)


def notify_inval_inode(device_fd: int, ino: int) -> None:
    """Have the kernel fetch the attributes of *ino* anew; never blocks.

    struct fuse_notify_inval_inode_out; an offset below 0 leaves the page cache alone.
    """
    _notify(device_fd, NOTIFY_INVAL_INODE, struct.pack("<Qqq", ino, -1, 0))


def notify_resend(device_fd: int) -> None:
    """Have the kernel send again all requests that were read and not answered.

    Raises OSError EINVAL before Linux 6.9.
    """
    _notify(device_fd, NOTIFY_RESEND, b"")


def notify_inc_epoch(device_fd: int) -> None:
    """Have the kernel look up every name anew. Raises OSError EINVAL before Linux 6.16."""
    _notify(device_fd, NOTIFY_INC_EPOCH, b"")


def notify_inval_entry(device_fd: int, parent: int, name: bytes) -> None:
    """Drop a cached name. Blocks while a LOOKUP or CREATE in *parent* is unanswered.

    A server that is killed meanwhile cannot exit before that request is answered, and nobody
    answers it any more. The device stays open, and the mount hangs until it is unmounted by force.
    """
    head = struct.pack("<QII", parent, len(name), 0)
    _notify(device_fd, NOTIFY_INVAL_ENTRY, head + name + b"\0")


class Invalidations:
    """Tells the kernel what kvfs itself changed: a thread of its own and its bounded queue.

    Nothing depends on a notification: an OPEN or GETATTR of a gone inode is answered ESTALE, and
    the kernel looks the name up again. So for an evicted block the kernel is only told that its
    attributes are stale, which never blocks. Dropping a name waits for the directory's lock, which
    a LOOKUP or CREATE that we have not answered yet may hold. On the event loop's thread that would
    be a deadlock, and a server that is killed during it hangs, too. So names are dropped only where
    the inode lives on.
    """

    def __init__(self, device_fd: int, *, tells: bool = True) -> None:
        """If *tells* is false the kernel is told nothing and finds out by itself."""
        self._device_fd = device_fd
        self._tells = tells
        self._tellings: queue.Queue[_Telling | None] = queue.Queue(_BACKLOG_MAX)
        self._thread: threading.Thread | None = None
        #: Once true, the device may be closed, and its descriptor number reused for an extent.
        self._stopped = False
        #: Messages for the kernel so far; in the end each is sent or skipped.
        self._due = 0
        self.sent = 0
        self.skipped = 0

    @property
    def backlog(self) -> int:
        """How many notifications are not sent yet."""
        return self._tellings.qsize()

    def entry_vanished(self, parent: InodeNo, name: bytes) -> None:
        """Have the kernel forget *name* in *parent*, whose inode may still be open."""
        self._tell(functools.partial(notify_inval_entry, self._device_fd, parent, name))

    def inode_vanished(self, ino: InodeNo, parent: InodeNo) -> None:
        """Have the kernel fetch the attributes of *ino*, which is gone, and *parent* anew."""
        self._tell(functools.partial(_inval_inodes, self._device_fd, ino, parent))

    def attributes_corrected(self, ino: InodeNo) -> None:
        """Have the kernel fetch the attributes of *ino* anew."""
        self._tell(functools.partial(_inval_inodes, self._device_fd, ino))

    async def catch_up(self) -> None:
        """Wait until the kernel knows what it was to be told so far, for a second at most."""
        due = self._due
        with trio.move_on_after(_CATCH_UP_S):
            while self.sent + self.skipped < due:  # noqa: ASYNC110 (no loop in its thread)
                await trio.sleep(_LOOK_S)

    def _tell(self, telling: _Telling) -> None:
        self._due += 1
        if not self._tells or self._stopped:
            self.skipped += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvfs-notify", daemon=True)
            self._thread.start()
        try:
            self._tellings.put_nowait(telling)
        except queue.Full:
            self.skipped += 1

    def stop(self) -> None:
        """Send nothing any more: the mount is gone, and the device is closed next.

        Waits 1 s at most for the thread, which may be blocked in the kernel.
        """
        self._stopped = True
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._tellings.put_nowait(None)
            self._thread.join(timeout=1.0)

    def _work(self) -> None:
        while (telling := self._tellings.get()) is not None and not self._stopped:
            try:
                telling()
                self.sent += 1
            except FileNotFoundError:
                self.sent += 1  # the kernel did not know it
            except OSError as error:
                self.skipped += 1
                _log.debug("invalidation not sent: %s", error)


def _inval_inodes(device_fd: int, *inos: InodeNo) -> None:
    for ino in inos:
        with contextlib.suppress(FileNotFoundError):  # the kernel does not know it
            notify_inval_inode(device_fd, ino)
