"""A plain directory as a source: the embedded default, on a file system shared with others."""

import contextlib
import os
from typing import Final

from kvfs.core.errors import (
    SourceBlank,
    SourceBusy,
    SourceDamaged,
    SourceForeign,
    SourceFull,
    SourceMissing,
)
from kvfs.core.pool_layout import LOCK
from kvfs.core.sizes import format_size
from kvfs.devices import pool_files
from kvfs.devices.capacity import ROOM_MIN_BYTES, Reserve, metadata_bytes, reserve_bytes
from kvfs.devices.device import Device, Fill
from kvfs.devices.parent_fs import fs_type_of, superblock_of, try_out
from kvfs.devices.pool_files import PoolHeader

_NAMES_SHOWN: Final = 3


def format_directory(
    path: str, *, capacity_bytes: int | None, force: bool, fill: Fill, reserve: Reserve
) -> PoolHeader:
    """Make a pool in directory *path*, which must be empty.

    *force* replaces an existing pool. A directory with other files is always refused, so that these
    are never touched. Without *capacity_bytes* the capacity is what is free now, less *reserve* and
    the pool's own needs. Raises SourceMissing, SourceForeign, SourceBusy or SourceFull before
    anything is removed; a later failure leaves an empty directory.
    """
    with contextlib.ExitStack() as stack:
        pool_fd = _open(path)
        stack.callback(os.close, pool_fd)
        fs_type = fs_type_of(pool_fd, path)
        _refuse_foreign(pool_fd, path)
        pool_files.refuse_no_files(pool_fd, path)
        was_pool = bool(pool_files.own_names(pool_fd))
        if was_pool and not force:
            _refuse_in_the_making(pool_fd, path)
            what = _pool_words(pool_fd, path)
            raise SourceForeign(f"{path} is not blank: {what}; --force overwrites it")
        if not was_pool:
            capacity_bytes = _capacity(pool_fd, path, capacity_bytes, reserve)
        try_out(pool_fd, path, fs_type)
        with pool_files.write_errors(path):
            stack.callback(os.close, pool_files.lock_pool(pool_fd, path, create=True))
            if not was_pool and pool_files.own_names(pool_fd) != [LOCK]:
                raise SourceBusy(f"{path} has just been formatted by another process")
            if was_pool:
                freed_bytes = pool_files.held_bytes(pool_fd)
                capacity_bytes = _capacity(pool_fd, path, capacity_bytes, reserve, freed_bytes)
            try:
                if was_pool:
                    pool_files.remove_tree(pool_fd, keep_lock=True)
                header = pool_files.new_header(capacity_bytes)
                pool_files.make_tree(pool_fd)
                fill(pool_fd)
                pool_files.write_header(pool_fd, header)
            except BaseException:
                pool_files.remove_tree(pool_fd)
                raise
    return header


def open_directory(
    path: str, *, read_only: bool, capacity_bytes: int | None, reserve: Reserve
) -> Device:
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
            capacity_bytes=capacity_bytes,
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
            pool_files.remove_tree(pool_fd)


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


def _refuse_foreign(pool_fd: int, path: str) -> None:
    names = pool_files.foreign_names(pool_fd)
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
    if pool_files.own_names(pool_fd):
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
    return LOCK in pool_files.own_names(pool_fd)


def _pool_words(pool_fd: int, path: str) -> str:
    """Describe the pool, for an error message. Raises FormatUnknown, SourceForeign (bad POOL)."""
    header = pool_files.read_header(pool_fd, path)
    return "unfinished kvfs pool" if header is None else f"kvfs pool, UUID {header.uuid}"


def _capacity(
    pool_fd: int, path: str, wanted_bytes: int | None, reserve: Reserve, freed_bytes: int = 0
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
