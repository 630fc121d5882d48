"""XFS as kvfs's allocator: how it is made and mounted, with a reason for each option.

If the kernel does not mount one, its superblock tells why (struct xfs_dsb in
fs/xfs/libxfs/xfs_format.h), where the errno is not enough.
"""

import contextlib
import errno
import fcntl
import logging
import os
import struct
from typing import Final, NamedTuple

from kvfs.core.errors import (
    CommandError,
    NotRoot,
    SourceBusy,
    SourceDamaged,
    SourceForeign,
    ToolMissing,
)
from kvfs.core.pool_layout import XFS_INODES, XFS_TREES
from kvfs.core.types import FIRST_DRIVE
from kvfs.devices.busy import Outlived
from kvfs.devices.detached import (
    MOUNT_ATTR_NOATIME,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NODIRATIME,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    mount_detached,
)
from kvfs.devices.device import Device, Fill, SourceKind, metadata_bytes
from kvfs.devices.pool_files import (
    PoolHeader,
    lock_pool,
    read_header,
    write_errors,
    write_header,
)
from kvfs.devices.pool_tree import make_tree
from kvfs.devices.probe import POOL_LABEL
from kvfs.devices.xfs_tools import (
    forget_cut_off,
    is_cut_off_noted,
    journal_is_dirty,
    last_line,
    note_cut_off,
    run_tool,
)
from kvfs.storage.pool_run import RunPlace, distrust_index
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)


class LeftMeanwhile(SourceBusy):
    """The last client of a dead mount closed its file system just before that was to be joined."""


class FailedButHeld(SourceBusy):
    """A file system that outlived its server has shut itself down: its clients must close it."""


#: mkfs takes longest to discard a large drive.
_MKFS_TIMEOUT_S: Final = 600.0
_MKFS_OPTIONS: Final = (
    "-q",
    # probe.py has checked the content, and refuses more than mkfs.xfs does.
    "-f",
    "-i",
    XFS_INODES,
    "-m",
    XFS_TREES,
    "-L",
    POOL_LABEL,
)
_MOUNT_OPTIONS: Final = {
    # How much XFS allocates ahead of each write past the end: by default as much again as the file
    # holds, which would use up the headroom of other writers. So none: a reserved extent needs no
    # more, and a growing one is allocated in one piece when it is written back. With scattered
    # writes the space allocated ahead of each would stay.
    "allocsize": "4k",
    # Creates and unlinks are bursts of small log items; the largest log buffer writes them in
    # fewer I/Os. Requests of clients cause no fsync here, so none waits for the buffer.
    "logbsize": "256k",
}
#: The index keeps the times, so updates of an extent's mtime need no log.
_MOUNT_FLAGS: Final = ("lazytime",)
_READ_ONLY_FLAGS: Final = ("ro",)
#: To look without writing anything, without log recovery either.
_LOOK_FLAGS: Final = ("ro", "norecovery")
_ATTRIBUTES: Final = (
    MOUNT_ATTR_NOATIME | MOUNT_ATTR_NODIRATIME | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
)
_OPEN_ROOT: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_pool(
    block_path: str, source: str, fill: Fill, header: PoolHeader, *, discard: bool
) -> PoolHeader:
    """Make an XFS with an empty pool on *block_path*; *source* is its name in messages.

    Overwrites what is there. *discard*: tell the drive that all of it is free. Raises
    SourceDamaged, SourceFull, ToolMissing, NotRoot.
    """
    # The UUID of the XFS is the pool's, so blkid shows it without a mount.
    identity = ("-m", f"uuid={header.uuid}")
    # A discard on a loop device would punch holes into the image behind it. On it XFS's own writes
    # are made page-sized, even if the drive below has smaller blocks.
    keep = () if discard else ("-K", "-s", "size=4096")
    arguments = (*_MKFS_OPTIONS, *identity, *keep, block_path)
    result = run_tool("mkfs.xfs", *arguments, timeout_s=_MKFS_TIMEOUT_S)
    if result.returncode != 0:
        raise SourceDamaged(f"{source}: mkfs.xfs fails: {last_line(result.stderr)}")
    with contextlib.ExitStack() as stack:
        _, pool_fd = _mount(stack, block_path, source, _MOUNT_FLAGS)
        with write_errors(source):
            os.fchmod(pool_fd, 0o700)
            os.close(lock_pool(pool_fd, source, create=True))
            make_tree(pool_fd)
            fill(pool_fd)
            write_header(pool_fd, header)
    return header


def look_at_pool(block_path: str, source: str) -> PoolHeader:
    """Return the header of the pool on *block_path* without writing a byte to it.

    Raises SourceForeign, FormatUnknown, SourceBusy, SourceDamaged, ToolMissing, NotRoot.
    """
    with contextlib.ExitStack() as stack:
        _, pool_fd = _mount(stack, block_path, source, _LOOK_FLAGS)
        header = read_header(pool_fd, source)
    if header is None:
        raise SourceForeign(
            f"{source}: its file system is labelled as a pool but holds no POOL",
            "kvfs mkfs --force starts again",
        )
    return header


def open_pool(
    block_path: str,
    source: str,
    kind: SourceKind,
    header: PoolHeader,
    *,
    read_only: bool,
) -> Device:
    """Mount the pool on *block_path* and return its device.

    *header* is what look_at_pool found. Raises what look_at_pool raises, and UsageError.
    """
    flags = (*_MOUNT_FLAGS, *(_READ_ONLY_FLAGS if read_only else ()))
    cut_off = journal_is_dirty(block_path, source) or is_cut_off_noted(header.epoch)
    if cut_off:
        note_cut_off(header.epoch)
        _go_through_journal(block_path, source, is_alone=header.several is None)
        if header.several is None:  # else the RUNs of all say it, once they are known
            forget_cut_off(header.epoch)
    with contextlib.ExitStack() as stack:
        mount_fd, pool_fd = _mount(stack, block_path, source, flags)
        device = _device(stack, mount_fd, pool_fd, source, kind, read_only)
        device.cut_off = cut_off
        stack.pop_all()  # the device closes them now
    return device


def join_pool(
    found: Outlived,
    block_path: str,
    source: str,
    kind: SourceKind,
    *,
    read_only: bool,
) -> Device:
    """Open the pool on *block_path*, whose file system *found* outlived its server.

    Its log is not checked: it was never unmounted, so the page cache is still the same. Raises what
    open_pool raises; LeftMeanwhile if it was unmounted meanwhile; FailedButHeld.
    """
    attributes = _ATTRIBUTES | (MOUNT_ATTR_RDONLY if read_only else 0)
    left = LeftMeanwhile(f"{source} was in use until just now; try again")
    with contextlib.ExitStack() as stack:
        try:
            mount_fd, pool_fd = _mount(
                stack, block_path, source, _MOUNT_FLAGS, attributes=attributes, joins=True
            )
            if found.is_gone() or read_header(pool_fd, source) is None:  # being made by another
                raise left
            device = _device(stack, mount_fd, pool_fd, source, kind, read_only)
        except (OSError, SourceDamaged, SourceForeign) as error:
            if found.is_gone():  # perhaps with its loop device, which then returns EIO
                raise left from error
            if not _has_shut_down(error):
                raise
            raise FailedButHeld(
                f"{source} is in use: its file system has failed, and programs still have files "
                "of its dead mount open; it can be mounted again when they are closed"
            ) from error
        device.outlived = True
        stack.pop_all()  # the device closes them now
    _log.info(
        "%s: clients of a dead mount still have its files open; its file system stays mounted",
        source,
    )
    return device


def _has_shut_down(error: BaseException) -> bool:
    """Whether *error* shows that XFS has shut itself down: EIO for everything but fstat."""
    cause = error if isinstance(error, OSError) else error.__context__
    return isinstance(cause, OSError) and cause.errno == errno.EIO


def _device(
    stack: contextlib.ExitStack,
    mount_fd: int,
    pool_fd: int,
    source: str,
    kind: SourceKind,
    read_only: bool,
) -> Device:
    """Lock the pool in *pool_fd* and return its device; until then *stack* closes its fds."""
    header = read_header(pool_fd, source)
    if header is None:
        raise SourceForeign(f"{source}: its file system holds no POOL")
    lock_fd = lock_pool(pool_fd, source, create=not read_only)
    stack.callback(os.close, lock_fd)
    space = os.fstatvfs(pool_fd)
    total_bytes = space.f_blocks * space.f_frsize
    return Device(
        kind=kind,
        source=source,
        fs_type="xfs",
        header=header,
        pool_fd=pool_fd,
        held_fds=[lock_fd, mount_fd],
        usable_bytes=total_bytes - metadata_bytes(total_bytes),
        reserved_bytes=0,
        read_only=read_only,
    )


def _go_through_journal(block_path: str, source: str, *, is_alone: bool) -> None:
    """Let XFS recover its log, and note in RUN of a pool of one that the index is not trusted.

    After the recovery the log is clean, and no longer shows that unsynced writes are lost. They are
    lost even if the machine kept running: the device failed for a moment, or XFS was shut down.
    """
    with contextlib.ExitStack() as stack:
        _, pool_fd = _mount(stack, block_path, source, _MOUNT_FLAGS)
        if is_alone:
            with write_errors(source):
                distrust_index([RunPlace(FIRST_DRIVE, pool_fd, "")], Syscalls())


def _mount(
    stack: contextlib.ExitStack,
    block_path: str,
    source: str,
    flags: tuple[str, ...],
    *,
    attributes: int = _ATTRIBUTES,
    joins: bool = False,
) -> tuple[int, int]:
    """Return the fds of a new mount and of its root directory; *stack* closes them."""
    try:
        mount_fd = mount_detached("xfs", block_path, _MOUNT_OPTIONS, flags, attributes, joins=joins)
    except OSError as error:
        raise unmountable(block_path, source, error) from error
    stack.callback(os.close, mount_fd)
    pool_fd = os.open(".", _OPEN_ROOT, dir_fd=mount_fd)
    stack.callback(os.close, pool_fd)
    return mount_fd, pool_fd


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
