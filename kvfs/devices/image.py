"""An image file as a source: fallocated in full, and used through a loop device.

The image is locked (flock) before it is first read. The loop device shares the open file, so the
lock ends with the last user of the pool, however the server ended.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvfs.core.encryption import Encryption, header_bytes
from kvfs.core.errors import (
    NO_SPACE,
    SourceBusy,
    SourceDamaged,
    SourceFull,
    SourceMissing,
    UsageError,
)
from kvfs.core.sizes import format_size
from kvfs.core.types import PAGE_BYTES, round_up
from kvfs.devices import block, dm_crypt, loop, probe, xfs
from kvfs.devices.busy import Outlived, is_alive, lock_holders, outlived
from kvfs.devices.device import XFS_MIN_BYTES, Device, Fill, image_size_bytes
from kvfs.devices.pool_files import PoolHeader
from kvfs.machine.mount_table import FS_TYPE, mount_of, where_in_use
from kvfs.storage.syscalls import Syscalls

_log = logging.getLogger(__name__)

#: Why an image that is there may not be written, with the way out. The drive is well.
_UNWRITABLE: Final = {
    errno.EPERM: "it is immutable or append-only (`chattr -i -a {path}` ends that)",
    errno.EACCES: "this process may not",
    errno.EROFS: "its file system is read-only",
}


def require_formattable(
    path: str,
    *,
    size_bytes: int | None,
    capacity_bytes: int | None,
    force: bool,
    encryption: Encryption | None = None,
) -> None:
    """Raise what keeps image file *path*, there or not, from being made a drive of a pool.

    That is what format_image raises. Nothing is written.
    """
    _refuse_kvfs(path)
    wish = _Wish(size_bytes, capacity_bytes, encryption)
    if not os.path.exists(path):
        _size_to_create(path, wish)
        return
    with _locked(path) as image_fd:
        _size_to_use(image_fd, path, wish, force=force)


def format_image(
    path: str,
    header: PoolHeader,
    *,
    size_bytes: int | None,
    force: bool,
    fill: Fill,
    encryption: Encryption | None = None,
) -> PoolHeader:
    """Make a pool with *header* in image file *path*, which is created if it is missing.

    *size_bytes* is the size of a created or empty image. Without it, the size is what the header's
    capacity needs. The file is fallocated in full. Raises SourceMissing, UsageError, SourceBusy,
    SourceForeign (unless *force*), SourceFull, SourceDamaged, ToolMissing; a file that it has
    created is removed in that case.
    """
    _refuse_kvfs(path)
    wish = _Wish(size_bytes, header.capacity_bytes, encryption)
    if not os.path.exists(path):
        return _format_new(path, header, wish, fill)
    with _locked(path) as image_fd:
        _allocate(image_fd, path, _size_to_use(image_fd, path, wish, force=force))
        return _make_pool(image_fd, path, fill, header, encryption)


def open_image(path: str, *, read_only: bool) -> Device:
    """Open the pool in image file *path*. Raises what open_block does; nothing has changed then."""
    _refuse_kvfs(path)
    with _outlived_in(path) as (block_path, found):
        if found is not None:
            block.require_pool(path)
            return xfs.join_pool(found, block_path, path, "image", read_only=read_only)
    with _locked(path) as image_fd:
        block.require_pool(path)
        with _attached(image_fd, path, read_only=True) as block_path:
            header = xfs.look_at_pool(block_path, path)
        # The loop device keeps the image open, and with it the lock, longer than any fd here.
        with _attached(image_fd, path) as block_path:
            return xfs.open_pool(block_path, path, "image", header, read_only=read_only)


def new_image_notes(
    sources: Sequence[str], capacity_bytes: int | None, encryption: Encryption | None = None
) -> Iterator[str]:
    """Yield a line on how much more than its blocks each image takes that is about to be made.

    *capacity_bytes* is that of the whole pool in *sources*; those that are there already are none.
    """
    if capacity_bytes is None:
        return
    part_bytes = capacity_bytes // len(sources)
    size_bytes = image_size_bytes(part_bytes)
    why = "; no XFS is smaller" if size_bytes == XFS_MIN_BYTES else " with index and file system"
    for path in sources:
        if not os.path.lexists(path):
            blocks = f"{format_size(part_bytes)} of blocks"
            taken = format_size(size_bytes + header_bytes(encryption))
            yield f"{path} takes {taken} for {blocks}{why}"


def outlives(path: str) -> bool:
    """Whether a file system in image *path* outlived its server. Raises SourceDamaged."""
    with _outlived_in(path) as (_, found):
        return found is not None


def header_of(path: str) -> PoolHeader | None:
    """Return the header of the pool in image file *path*. Raises what open_image raises.

    None: its XFS cannot be mounted.
    """
    with _locked(path) as image_fd:
        return _header_in(image_fd, path)


def _header_in(image_fd: int, path: str) -> PoolHeader | None:
    block.require_pool(path)
    with _attached(image_fd, path, read_only=True) as block_path:
        return block.known_header(block_path, path)


def destroy_image(path: str) -> None:
    """Make image file *path*, which holds a pool, blank. Raises what open_image raises."""
    with _locked(path) as image_fd:
        _header_in(image_fd, path)
        _blank(image_fd, path)


def blank_image(path: str) -> None:
    """Make image file *path* blank, whatever it holds. Raises SourceBusy, SourceDamaged."""
    with _locked(path) as image_fd:
        _blank(image_fd, path)


def _blank(image_fd: int, path: str) -> None:
    try:
        probe.zero_edges(image_fd)
    except OSError as error:
        raise SourceDamaged(f"{path}: {error.strerror}") from error


@contextlib.contextmanager
def image_as_block(path: str) -> Iterator[str]:
    """Yield a loop device for image file *path*, which no other has; it ends with its last user.

    Raises SourceMissing, SourceBusy, SourceDamaged, ToolMissing.
    """
    with _locked(path) as image_fd, _attached(image_fd, path) as block_path:
        yield block_path


def refuse_busy_image(path: str) -> None:
    """Raise SourceBusy when image *path* has a user."""
    with _locked(path):
        pass


class _Wish(NamedTuple):
    """What an image is to become: its size if that was said, the blocks in it, and its key."""

    size_bytes: int | None
    capacity_bytes: int | None
    encryption: Encryption | None

    def new_size(self, path: str) -> int:
        """Return the size of an image without one. Raises UsageError."""
        if self.size_bytes is not None:
            return round_up(self.size_bytes, PAGE_BYTES)
        if self.capacity_bytes is not None:
            return image_size_bytes(self.capacity_bytes) + header_bytes(self.encryption)
        raise UsageError(f"{path} has no size yet; give it one with --capacity")

    def refuse(self, path: str, size_bytes: int) -> None:
        """Raise SourceFull or UsageError for a size that is too small."""
        block.refuse_size(path, size_bytes - header_bytes(self.encryption), self.capacity_bytes)


def _size_to_use(image_fd: int, path: str, wish: _Wish, *, force: bool) -> int:
    """Return the size of a pool in the locked image that is there. Raises what keeps it out."""
    probe.refuse_content(path, probe.find_content(path), force=force)
    present_bytes = os.fstat(image_fd).st_size
    if present_bytes and wish.size_bytes not in (None, present_bytes):
        raise UsageError(f"{path} already has a size: {format_size(present_bytes)}")
    size_bytes = present_bytes or wish.new_size(path)
    wish.refuse(path, size_bytes)
    return size_bytes


def _size_to_create(path: str, wish: _Wish) -> int:
    """Return the size of an image that is not there. Raises UsageError, SourceFull."""
    size_bytes = wish.new_size(path)
    wish.refuse(path, size_bytes)
    parent = os.path.dirname(os.path.abspath(path))
    space = os.statvfs(parent)
    free_bytes = space.f_bavail * space.f_frsize
    if size_bytes > free_bytes:
        raise SourceFull(
            f"{path}: {format_size(size_bytes)} do not fit into the {format_size(free_bytes)} "
            f"free in {parent}"
        )
    return size_bytes


def _format_new(path: str, header: PoolHeader, wish: _Wish, fill: Fill) -> PoolHeader:
    size_bytes = _size_to_create(path, wish)
    try:
        image_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be created: {error.strerror}") from None
    try:
        _lock(image_fd, path)  # if it fails, another process was faster: do not remove its file
        try:
            _allocate(image_fd, path, size_bytes)
            return _make_pool(image_fd, path, fill, header, wish.encryption)
        except BaseException:
            os.unlink(path)
            raise
    finally:
        os.close(image_fd)


def _refuse_kvfs(path: str) -> None:
    """Raise SourceMissing when image *path* lies on a kvfs mount, which may evict it."""
    below = mount_of(os.path.realpath(path))
    if below is not None and below.fs_type == FS_TYPE:
        raise SourceMissing(
            f"{path} lies on the kvfs mount {below.mountpoint}, which may evict it; use a file on "
            "another file system"
        )


def _make_pool(
    image_fd: int, path: str, fill: Fill, header: PoolHeader, encryption: Encryption | None
) -> PoolHeader:
    with _attached(image_fd, path) as block_path:
        if encryption is not None:
            return dm_crypt.make_pool(block_path, path, fill, header, encryption)
        return xfs.make_pool(block_path, path, fill, header, discard=False)


def _allocate(image_fd: int, path: str, size_bytes: int) -> None:
    try:
        Syscalls().fallocate(image_fd, 0, 0, size_bytes)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise SourceFull(f"{path}: no room for {format_size(size_bytes)}") from error
        raise SourceDamaged(f"{path} cannot be allocated: {error.strerror}") from error


@contextlib.contextmanager
def _outlived_in(path: str) -> Iterator[tuple[str, Outlived | None]]:
    """Yield path and Outlived of the image's loop device whose XFS outlived its server; or None."""
    with contextlib.ExitStack() as stack:
        for user in _loop_users(path):
            found = stack.enter_context(outlived(user))
            if found is not None:
                yield user, found
                return
        yield "", None


def _loop_users(path: str) -> list[str]:
    try:
        image_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the caller's own open fails too, with a message
        return []
    try:
        others = lock_holders(os.fstat(image_fd)) - {os.getpid()}
        if any(map(is_alive, others)):
            return []  # a living server, or another process that makes a pool of it
        return list(loop.users_of(image_fd))
    finally:
        os.close(image_fd)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Yield a locked O_RDWR fd of *path*. Raises SourceMissing, SourceBusy, SourceDamaged."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SourceMissing(f"{path} does not exist") from None
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise SourceDamaged(f"{path}: {error.strerror}") from error
        way_out = _UNWRITABLE[error.errno].format(path=shlex.quote(path))
        raise SourceMissing(f"{path} may not be written: {way_out}") from None
    try:
        _lock(fd, path)
        yield fd
    finally:
        os.close(fd)


def _lock(image_fd: int, path: str) -> None:
    try:
        fcntl.flock(image_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        where = where_in_use(path) or "already"
        holders = lock_holders(os.fstat(image_fd))
        # None known (another pid namespace) is no dead one.
        leaves = holders and not any(map(is_alive, holders))
        busy = xfs.LeftMeanwhile if leaves else SourceBusy
        raise busy(f"{path} is in use: the pool in it is mounted {where}") from None
    users = list(loop.users_of(image_fd))
    if users:
        raise SourceBusy(f"{path} is in use: attached to {', '.join(users)}")


@contextlib.contextmanager
def _attached(image_fd: int, path: str, *, read_only: bool = False) -> Iterator[str]:
    """Yield the path of a loop device for the image; after that it ends with its last user."""
    attached = loop.attach(image_fd, path, read_only=read_only)
    try:
        if not attached.direct_io and not read_only:
            _log.warning("direct I/O is not available on image %s: its data is cached twice", path)
        yield attached.path
    finally:
        os.close(attached.fd)
