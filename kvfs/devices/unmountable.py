"""Explains why the kernel does not mount an XFS, from its superblock if the errno is not enough.

Fields and their places: struct xfs_dsb in fs/xfs/libxfs/xfs_format.h.
"""

import contextlib
import errno
import fcntl
import os
import struct
from typing import Final, NamedTuple

from kvfs.core.errors import CommandError, NotRoot, SourceBusy, SourceDamaged, ToolMissing

#: Magic, UUID, bytes of a sector, and whether mkfs.xfs was interrupted.
_SUPERBLOCK: Final = struct.Struct(">4s28x16s54xH22xB")
_MAGIC: Final = b"XFSB"
_MOUNTED: Final = "/sys/fs/xfs"
#: linux/fs.h: the size of a logical block of the device, an int.
_BLKSSZGET: Final = 0x1268
_INT: Final = struct.Struct("=i")


class _Superblock(NamedTuple):
    uuid: bytes
    sector_bytes: int
    is_unfinished: bool


def unmountable(block_path: str, source: str, error: OSError) -> CommandError:
    """Return the error to report when mounting the XFS on *block_path* failed with *error*."""
    if error.errno == errno.EBUSY:
        return SourceBusy(f"{source} is in use: it has just been mounted by another process")
    if error.errno == errno.EPERM:
        return NotRoot(f"{source}: mounting it needs root (CAP_SYS_ADMIN)")
    superblock = _superblock_of(block_path)
    if superblock is not None:
        if superblock.is_unfinished:
            return SourceDamaged(
                f"{source} holds an unfinished pool: mkfs was cut short; `kvfs mkfs --force` "
                "starts again"
            )
        # XFS returns ENOSYS for such sectors (xfs_configure_buftarg in fs/xfs/xfs_buf.c).
        device_bytes = _sector_of(block_path)
        if superblock.sector_bytes < device_bytes:
            return SourceDamaged(
                f"{source}: its XFS has sectors of {superblock.sector_bytes} bytes, and the device "
                f"has sectors of {device_bytes}: it was made on another one, and is usable there"
            )
        if twin := _twin_of(block_path, superblock.uuid):
            return SourceBusy(
                f"{source} is a copy of the pool on {twin}, which is in use: an XFS is mounted "
                "once for each UUID; unmount that one first"
            )
    if error.errno in (errno.ENODEV, errno.ENOSYS):
        return ToolMissing("the kernel has no XFS, or no fsopen (Linux 5.2 and later have)")
    return SourceDamaged(
        f"{source}: its XFS cannot be mounted: {error.strerror}; see dmesg and xfs_repair"
    )


def _superblock_of(block_path: str) -> _Superblock | None:
    with contextlib.suppress(OSError), open(block_path, "rb", buffering=0) as file:
        raw = os.pread(file.fileno(), _SUPERBLOCK.size, 0)
        if len(raw) == _SUPERBLOCK.size:
            magic, uuid, sector_bytes, in_progress = _SUPERBLOCK.unpack(raw)
            if magic == _MAGIC:
                return _Superblock(uuid, sector_bytes, bool(in_progress))
    return None


def _sector_of(block_path: str) -> int:
    """Return the sector size of the device in bytes; 0 if it is unknown."""
    with contextlib.suppress(OSError), open(block_path, "rb", buffering=0) as file:
        return int(_INT.unpack(fcntl.ioctl(file.fileno(), _BLKSSZGET, bytes(_INT.size)))[0])
    return 0


def _twin_of(block_path: str, uuid: bytes) -> str:
    """Return the device of another mounted XFS with the same *uuid*; "" if there is none."""
    own = os.path.basename(os.path.realpath(block_path))
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(_MOUNTED)):
            device = f"/dev/{name}"
            found = _superblock_of(device) if name != own else None
            if found is not None and found.uuid == uuid:
                return device
    return ""
