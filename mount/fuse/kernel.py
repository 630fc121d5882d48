"""The system calls a FUSE server makes around /dev/fuse: mount, backing ids, messages.

Nothing here knows what a block or a handle is. Every function raises OSError with the kernel's
errno. Layouts: linux/include/uapi/linux/fuse.h; measured behaviour: docs/dev/architecture.md.
"""

import fcntl
import os
import struct
from typing import Final

from kvfs.core.types import BackingId
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

#: _IOW(229, 1, struct fuse_backing_map): the id is the return value.
_BACKING_OPEN: Final = 0x4010E501
#: _IOW(229, 2, u32).
_BACKING_CLOSE: Final = 0x4004E502
_BACKING_MAP: Final = struct.Struct("<iIQ")


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
    return mount_detached(fs_type, source, options, flags, attributes)


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
