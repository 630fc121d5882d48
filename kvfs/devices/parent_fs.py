"""The file system under a directory source: its type, and whether it has what kvfs needs."""

import ctypes
import errno
import os
import uuid
from typing import Final

from kvfs.core.errors import NO_SPACE, NotRoot, SourceDamaged, SourceFull, SourceMissing
from kvfs.storage.extents import Extents
from kvfs.storage.file_xattrs import XATTR_FIXED
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, LIBC, Syscalls

#: linux/magic.h. ext2 and ext3 have ext4's number; without extents they fail ``try_out``.
_KNOWN: Final = {0x58465342: "xfs", 0xEF53: "ext4", 0x01021994: "tmpfs", 0x9123683E: "btrfs"}
#: Refused by name, since their problems would show only later. FUSE passthrough does not work
#: through a stacked file system, a network may fail or hang for any time, and ramfs has no size
#: limit.
_REFUSED: Final = {
    0x794C7630: "overlayfs",
    0x65735546: "FUSE",
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x858458F6: "ramfs",
    0xF15F: "eCryptfs",
}
_ADVICE: Final = "use a directory on XFS, ext4 or tmpfs"
_TRIAL_BYTES: Final = 1 << 20
#: struct statfs is 120 bytes on 64-bit Linux; its first member, f_type, is a long.
_STATFS_BYTES: Final = 256


def fs_type_of(directory_fd: int, source: str) -> str:
    """Return the type of the file system under *directory_fd*, by statfs(2); hex if unknown.

    *source* is its name in messages. Raises SourceMissing for a file system that kvfs cannot use,
    SourceDamaged.
    """
    raw = ctypes.create_string_buffer(_STATFS_BYTES)
    if LIBC.fstatfs(directory_fd, raw) != 0:
        raise SourceDamaged(f"{source}: {os.strerror(ctypes.get_errno())}")
    magic = ctypes.c_long.from_buffer(raw).value & 0xFFFFFFFF
    if magic in _REFUSED:
        raise SourceMissing(f"{source} lies on {_REFUSED[magic]}, which kvfs cannot use; {_ADVICE}")
    return _KNOWN.get(magic, f"{magic:#x}")


def try_out(directory_fd: int, source: str, fs_type: str) -> None:
    """Try with a nameless file what extents need: reserving and freeing space, trusted xattrs.

    Raises SourceMissing, which names what is missing, SourceFull, SourceDamaged (read-only) or
    NotRoot. Leaves nothing behind.
    """
    syscalls = Syscalls()
    step = "nameless files"
    try:
        fd = syscalls.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
        try:
            step = "trusted xattrs"
            syscalls.setxattr(fd, XATTR_FIXED, b"trial")
            before_bytes = syscalls.fstat(fd).st_blocks
            step = "fallocate beyond the end of a file"
            syscalls.fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, _TRIAL_BYTES)
            Extents(directory_fd, syscalls, fs_type).trim(fd, 0)
            lacking = syscalls.fstat(fd).st_blocks > before_bytes
        finally:
            syscalls.close(fd)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise SourceFull(f"{source}: its file system is full") from error
        if error.errno == errno.EROFS:
            raise SourceDamaged(f"{source}: its file system is read-only") from error
        if error.errno == errno.EPERM:
            raise NotRoot(f"{source}: {step} need root (CAP_SYS_ADMIN)") from error
        raise SourceMissing(
            f"{source} lies on {fs_type}, which lacks {step} ({error.strerror}); {_ADVICE}"
        ) from error
    if lacking:
        raise SourceMissing(
            f"{source} lies on {fs_type}, which does not free blocks beyond a file's end; {_ADVICE}"
        )


_BLOCK_DEVICE: Final = "/sys/dev/block/{major}:{minor}"
_INSTANCE: Final = "/sys/fs/{fs_type}/{device}"
#: linux/stat.h (Linux 6.8) and linux/fcntl.h.
_STATX_MNT_ID_UNIQUE: Final = 0x4000
_AT_EMPTY_PATH: Final = 0x1000
#: struct statx: stx_mask at 0, stx_mnt_id at 144, 256 bytes.
_STATX_BYTES: Final = 256
_MNT_ID_AT: Final = 144


def superblock_of(directory_fd: int, fs_type: str) -> str:
    """Return a word that is unique to the mounted instance of the file system at *directory_fd*.

    The same boot id proves that the page cache is intact only if the file system stayed mounted.
    Nothing inside a file system shows whether it was cut off and mounted again, but the kernel
    does. XFS, ext4 and others have a directory in sysfs for each mounted instance
    (Documentation/ABI/testing/sysfs-fs-* in the kernel's sources), and kernfs uses none of its
    inode numbers twice in one boot. All mounts of an instance share it, also in containers.

    Empty for tmpfs, whose content ends with the instance. If the instance is unknown, the word is
    different in each call.
    """
    if fs_type == "tmpfs":
        return ""
    number = os.fstat(directory_fd).st_dev
    path = _BLOCK_DEVICE.format(major=os.major(number), minor=os.minor(number))
    instance = _INSTANCE.format(fs_type=fs_type, device=os.path.basename(os.path.realpath(path)))
    try:
        return f"{fs_type} {os.stat(instance).st_ino}"
    except OSError:  # btrfs names its directory by UUID, and has no block device of its own
        return _mount_word(directory_fd)


def _mount_word(directory_fd: int) -> str:
    """Return a word that is unique to the mount, not only to the instance."""
    raw = bytearray(_STATX_BYTES)
    buffer = (ctypes.c_char * _STATX_BYTES).from_buffer(raw)
    failed = LIBC.statx(directory_fd, b"", _AT_EMPTY_PATH, _STATX_MNT_ID_UNIQUE, buffer)
    if failed or not int.from_bytes(raw[:4], "little") & _STATX_MNT_ID_UNIQUE:
        return f"unknown {uuid.uuid4()}"
    return f"mount {int.from_bytes(raw[_MNT_ID_AT : _MNT_ID_AT + 8], 'little')}"
