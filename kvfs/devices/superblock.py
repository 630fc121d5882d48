"""The mounted instance of a file system that a directory is on; each new mount is another one.

A boot id vouches for the page cache of a file system only as long as that stays mounted. Nothing
inside a file system tells whether it was cut off and mounted anew since; the kernel does. XFS, ext4
and others have a directory in sysfs for each mounted instance (Documentation/ABI/testing/sysfs-fs-*
in the kernel's sources), and kernfs gives none of its inode numbers twice in one boot. All mounts
of one instance share it, bind mounts and containers too.
"""

import ctypes
import os
import uuid
from typing import Final

from kvfs.storage.syscalls import LIBC

_BLOCK_DEVICE: Final = "/sys/dev/block/{major}:{minor}"
_INSTANCE: Final = "/sys/fs/{fs_type}/{device}"
#: linux/stat.h (Linux 6.8) and linux/fcntl.h.
_STATX_MNT_ID_UNIQUE: Final = 0x4000
_AT_EMPTY_PATH: Final = 0x1000
#: struct statx: stx_mask at 0, stx_mnt_id at 144, 256 bytes.
_STATX_BYTES: Final = 256
_MNT_ID_AT: Final = 144


def superblock_of(directory_fd: int, fs_type: str) -> str:
    """Return a word for the mounted instance under *directory_fd*; another one tells of another.

    Empty for tmpfs, whose content ends with it. Where nothing tells, a word that is never equal:
    unknown is not the same.
    """
    if fs_type == "tmpfs":
        return ""
    number = os.fstat(directory_fd).st_dev
    path = _BLOCK_DEVICE.format(major=os.major(number), minor=os.minor(number))
    instance = _INSTANCE.format(fs_type=fs_type, device=os.path.basename(os.path.realpath(path)))
    try:
        return f"{fs_type} {os.stat(instance).st_ino}"
    except OSError:  # btrfs names it by its UUID, and has no block device of its own
        return _mount_word(directory_fd)


def _mount_word(directory_fd: int) -> str:
    """Return a word for the mount alone: one instance may have several, each with its own."""
    raw = bytearray(_STATX_BYTES)
    buffer = (ctypes.c_char * _STATX_BYTES).from_buffer(raw)
    failed = LIBC.statx(directory_fd, b"", _AT_EMPTY_PATH, _STATX_MNT_ID_UNIQUE, buffer)
    if failed or not int.from_bytes(raw[:4], "little") & _STATX_MNT_ID_UNIQUE:
        return f"unknown {uuid.uuid4()}"
    return f"mount {int.from_bytes(raw[_MNT_ID_AT : _MNT_ID_AT + 8], 'little')}"
