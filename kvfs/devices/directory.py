"""A plain directory as a source: the embedded default, on a file system shared with others.

The file system below must have what kvfs needs.
"""

import contextlib
import ctypes
import errno
import os
import uuid
from typing import Final

from kvfs.core.errors import (
    NO_SPACE,
    NotRoot,
    SourceBlank,
    SourceBusy,
    SourceDamaged,
    SourceForeign,
    SourceFull,
    SourceMissing,
)
from kvfs.core.pool_layout import LOCK
from kvfs.core.sizes import format_size
from kvfs.devices import pool_files, pool_tree
from kvfs.devices.device import (
    ROOM_MIN_BYTES,
    Device,
    DirectoryReserve,
    Fill,
    metadata_bytes,
    reserve_bytes,
)
from kvfs.devices.pool_files import PoolHeader
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
            Extents((directory_fd,), syscalls, fs_type).trim(fd, 0)
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


_NAMES_SHOWN: Final = 3


def require_formattable(
    path: str, *, capacity_bytes: int | None, force: bool, reserve: DirectoryReserve
) -> None:
    """Raise what keeps directory *path* from being made a drive of a pool; nothing is removed.

    That is what format_directory raises.
    """
    pool_fd = _open(path)
    try:
        freed_bytes = 0
        if _require_formattable(pool_fd, path, force=force):
            with contextlib.suppress(SourceForeign):  # no LOCK: nobody holds it
                os.close(pool_files.lock_pool(pool_fd, path))
            freed_bytes = pool_tree.held_bytes(pool_fd)
        _capacity(pool_fd, path, capacity_bytes, reserve, freed_bytes)
        try_out(pool_fd, path, fs_type_of(pool_fd, path))
    finally:
        os.close(pool_fd)


def format_directory(
    path: str, header: PoolHeader, *, force: bool, fill: Fill, reserve: DirectoryReserve
) -> PoolHeader:
    """Make a pool with *header* in directory *path*, which must be empty; return what POOL says.

    *force* replaces an existing pool. A directory with other files is always refused, so that these
    are never touched. If the header names no capacity, it is what is free now, less *reserve* and
    the pool's own needs. Raises SourceMissing, SourceForeign, SourceBusy or SourceFull before
    anything is removed; a later failure leaves an empty directory.
    """
    capacity_bytes = header.capacity_bytes
    with contextlib.ExitStack() as stack:
        pool_fd = _open(path)
        stack.callback(os.close, pool_fd)
        was_pool = _require_formattable(pool_fd, path, force=force)
        if not was_pool:
            capacity_bytes = _capacity(pool_fd, path, capacity_bytes, reserve)
        try_out(pool_fd, path, fs_type_of(pool_fd, path))
        with pool_files.write_errors(path):
            stack.callback(os.close, pool_files.lock_pool(pool_fd, path, create=True))
            if not was_pool and pool_tree.own_names(pool_fd) != [LOCK]:
                raise SourceBusy(f"{path} has just been formatted by another process")
            if was_pool:
                freed_bytes = pool_tree.held_bytes(pool_fd)
                capacity_bytes = _capacity(pool_fd, path, capacity_bytes, reserve, freed_bytes)
            try:
                if was_pool:
                    pool_tree.remove_tree(pool_fd, keep_lock=True)
                header = header._replace(capacity_bytes=capacity_bytes)
                pool_tree.make_tree(pool_fd)
                fill(pool_fd)
                pool_files.write_header(pool_fd, header)
            except BaseException:
                pool_tree.remove_tree(pool_fd)
                raise
    return header


def header_of(path: str) -> PoolHeader | None:
    """Return the header of the pool in directory *path*. Raises what open_directory raises.

    None: a format or destroy of it was interrupted.
    """
    pool_fd = _open(path)
    try:
        return None if _is_unfinished(pool_fd, path) else _require_pool(pool_fd, path)
    finally:
        os.close(pool_fd)


def open_directory(path: str, *, read_only: bool, reserve: DirectoryReserve) -> Device:
    """Open the pool in directory *path*.

    Raises SourceBlank, SourceForeign, FormatUnknown, SourceBusy, SourceMissing, UsageError;
    nothing is written.
    """
    with contextlib.ExitStack() as stack:
        pool_fd = _open(path)
        stack.callback(os.close, pool_fd)
        fs_type = fs_type_of(pool_fd, path)
        header = _require_pool(pool_fd, path)
        lock_fd = pool_files.lock_pool(pool_fd, path, create=not read_only)
        stack.callback(os.close, lock_fd)
        space = os.fstatvfs(pool_fd)
        total_bytes = space.f_blocks * space.f_frsize
        reserved_bytes = reserve_bytes(total_bytes, reserve)
        device = Device(
            kind="directory",
            source=path,
            fs_type=fs_type,
            header=header,
            pool_fd=pool_fd,
            held_fds=[lock_fd],
            usable_bytes=total_bytes - reserved_bytes,
            reserved_bytes=reserved_bytes,
            read_only=read_only,
            superblock=superblock_of(pool_fd, fs_type),
        )
        stack.pop_all()  # the device closes them now
    return device


def destroy_directory(path: str) -> None:
    """Remove the pool's own files from *path* and leave the rest.

    An unfinished pool is removed, too, because an interrupted removal has removed POOL first.
    Raises what open_directory raises.
    """
    with contextlib.ExitStack() as stack:
        pool_fd = _open(path)
        stack.callback(os.close, pool_fd)
        if not _is_unfinished(pool_fd, path):
            _require_pool(pool_fd, path)
        stack.callback(os.close, pool_files.lock_pool(pool_fd, path))
        with pool_files.write_errors(path):
            pool_tree.remove_tree(pool_fd)


def refuse_busy_directory(path: str) -> None:
    """Raise SourceBusy when the pool in directory *path* is mounted."""
    pool_fd = _open(path)
    try:
        with contextlib.suppress(SourceForeign):  # no LOCK: nobody holds it
            os.close(pool_files.lock_pool(pool_fd, path))
    finally:
        os.close(pool_fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SourceMissing(f"{path} does not exist") from None
    except OSError as error:
        raise SourceDamaged(f"{path}: {error.strerror}") from error


def _require_formattable(pool_fd: int, path: str, *, force: bool) -> bool:
    """Return whether a pool is in the directory, which *force* gives up. Raises CommandError."""
    fs_type_of(pool_fd, path)
    _refuse_foreign(pool_fd, path)
    pool_files.refuse_no_files(pool_fd, path)
    was_pool = bool(pool_tree.own_names(pool_fd))
    if was_pool and not force:
        _refuse_in_the_making(pool_fd, path)
        what = _pool_words(pool_fd, path)
        raise SourceForeign(f"{path} is not blank: {what}; --force overwrites it")
    return was_pool


def _refuse_foreign(pool_fd: int, path: str) -> None:
    names = pool_tree.foreign_names(pool_fd)
    if names:
        shown = ", ".join(ascii(name)[1:-1] for name in names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise SourceForeign(
            f"{path} is not a kvfs pool and not empty: {shown}{more}", "give an empty directory"
        )


def _require_pool(pool_fd: int, path: str) -> PoolHeader:
    header = pool_files.read_header(pool_fd, path)
    if header is not None:
        return header
    _refuse_foreign(pool_fd, path)
    if pool_tree.own_names(pool_fd):
        _refuse_in_the_making(pool_fd, path)
        header = pool_files.read_header(pool_fd, path)  # somebody may have finished it meanwhile
        if header is not None:
            return header
        raise SourceForeign(f"{path} holds an unfinished pool; kvfs mkfs --force starts again")
    raise SourceBlank(
        f"{path} is not a kvfs pool: it is empty", f"kvfs mkfs {path} makes a pool of it"
    )


def _refuse_in_the_making(pool_fd: int, path: str) -> None:
    """Raise SourceBusy if the pool has no POOL because another process makes or removes it."""
    if pool_files.read_header(pool_fd, path) is None and pool_files.is_locked(pool_fd):
        raise SourceBusy(f"{path} is in use: another process makes or removes a pool in it")


def _is_unfinished(pool_fd: int, path: str) -> bool:
    """Whether a format or destroy was interrupted: LOCK is made first and removed last."""
    if pool_files.read_header(pool_fd, path) is not None:
        return False
    _refuse_foreign(pool_fd, path)
    return LOCK in pool_tree.own_names(pool_fd)


def _pool_words(pool_fd: int, path: str) -> str:
    """Describe the pool, for an error message. Raises FormatUnknown, SourceForeign (bad POOL)."""
    header = pool_files.read_header(pool_fd, path)
    return "unfinished kvfs pool" if header is None else f"kvfs pool, UUID {header.uuid}"


def _capacity(
    pool_fd: int,
    path: str,
    wanted_bytes: int | None,
    reserve: DirectoryReserve,
    freed_bytes: int = 0,
) -> int:
    """Return the capacity (bytes) of a new pool, once *freed_bytes* of an old one are removed.

    Raises SourceFull if there is no space for it, or if it would be too small.
    """
    space = os.fstatvfs(pool_fd)
    total_bytes = space.f_blocks * space.f_frsize
    kept_bytes = reserve_bytes(total_bytes, reserve)
    usable_bytes = max(0, space.f_bavail * space.f_frsize + freed_bytes - kept_bytes)
    most_bytes = usable_bytes - metadata_bytes(usable_bytes)
    if max(wanted_bytes or 0, ROOM_MIN_BYTES) > most_bytes:
        wanted = format_size(wanted_bytes or ROOM_MIN_BYTES)
        raise SourceFull(
            f"{path}: no space for {wanted} of blocks: {format_size(most_bytes)} available, "
            f"{format_size(kept_bytes)} reserved for others"
        )
    return wanted_bytes or most_bytes
