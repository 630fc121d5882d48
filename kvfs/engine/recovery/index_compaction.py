"""Compacts an index that was larger: a start copies it and gives the free pages back.

LMDB reuses free pages but never makes its file smaller, so blocks could never use the space of
removed names. The copy is complete and durable in ``index.new`` before one rename puts it in the
place of the old index. After a kill there is one of the two, and the next start removes
``index.new``.
"""

import contextlib
import logging
import os
from typing import Final

import lmdb

from kvfs.core.errors import CommandError, Damaged
from kvfs.core.pool_layout import DATA_NAME, INDEX, INDEX_NEW
from kvfs.engine.recovery.index_probe import read_apart
from kvfs.storage.index_swap import index_path, remove_index
from kvfs.storage.lmdb_file import (
    SPARE_PAGES,
    check_data_file,
    open_environment,
    raise_index_error,
    rows_bytes,
)
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: A smaller gain is not worth a copy: more than this is preallocated anyway.
_GAIN_LEAST_BYTES: Final = 16 << 20
#: Nor is a smaller share of the file, which new names will fill.
_GAIN_LEAST_SHARE: Final = 1 / 2
#: More is not copied: a start waits for the copy, some seconds for this much.
_COPIED_MOST_BYTES: Final = 4 << 30


def compact_index(pool_fd: int, syscalls: Syscalls) -> int:
    """Compact the index of an open pool if that is worth it; nobody has the index open.

    An index that cannot be copied, or not now, stays as it is. Return how many bytes of free pages
    were given back.
    """
    path = index_path(pool_fd)
    try:
        used_bytes = check_data_file(path, spare_pages=SPARE_PAGES)
        if used_bytes < _GAIN_LEAST_BYTES:
            return 0
        copied_bytes = _rows_bytes(path, used_bytes)
        gain_bytes = used_bytes - copied_bytes
        if not _is_due(used_bytes, copied_bytes) or not _has_room(pool_fd, copied_bytes, syscalls):
            return 0
        try:
            _copy(pool_fd, used_bytes, syscalls)
            _replace(pool_fd, syscalls)
        finally:
            remove_index(INDEX_NEW, pool_fd, syscalls)
    except (CommandError, Damaged, OSError) as error:
        _log.info("index: free pages not returned: %s", error)
        return 0
    _log.info("index: %d bytes of free pages returned to the device", gain_bytes)
    return gain_bytes


def _is_due(used_bytes: int, copied_bytes: int) -> bool:
    least_bytes = max(_GAIN_LEAST_BYTES, int(used_bytes * _GAIN_LEAST_SHARE))
    return used_bytes - copied_bytes >= least_bytes and copied_bytes <= _COPIED_MOST_BYTES


def _rows_bytes(path: str, map_bytes: int) -> int:
    """Return the bytes of all pages with rows. Raises IndexDamaged, ToolMissing, OSError."""
    env = open_environment(path, map_bytes, read_only=True)
    try:
        return rows_bytes(env)
    except lmdb.Error as error:
        raise_index_error(error)
    finally:
        env.close()


def _has_room(pool_fd: int, copied_bytes: int, syscalls: Syscalls) -> bool:
    """Whether the device has space for twice the copy: its trees and others need some, too."""
    status = syscalls.statvfs(pool_fd)
    return status.f_bavail * status.f_frsize > 2 * copied_bytes + _GAIN_LEAST_BYTES // 16


def _copy(pool_fd: int, map_bytes: int, syscalls: Syscalls) -> None:
    """Write a durable copy to ``index.new``. Raises IndexDamaged, ToolMissing, OSError."""
    syscalls.mkdir(INDEX_NEW, 0o700, dir_fd=pool_fd)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = syscalls.open(f"{INDEX_NEW}/{DATA_NAME}", flags, 0o600, dir_fd=pool_fd)
    try:
        read_apart(lambda: _write_copy(index_path(pool_fd), map_bytes, fd))
        syscalls.fsync(fd)
    finally:
        syscalls.close(fd)
    check_data_file(index_path(pool_fd, INDEX_NEW))


def _write_copy(path: str, map_bytes: int, fd: int) -> None:
    """Do the child's part, which reads every page; damage may kill it."""
    env = open_environment(path, map_bytes, read_only=True)
    try:
        env.copyfd(fd, compact=True)
    except lmdb.Error as error:
        raise_index_error(error)
    finally:
        env.close()


def _replace(pool_fd: int, syscalls: Syscalls) -> None:
    """Put the copy's file in the place of the old one by one rename. Raises OSError.

    So a kill at any time leaves an index. (A rebuild differs: it has no sound file to replace.)
    """
    syscalls.rename(
        f"{INDEX_NEW}/{DATA_NAME}", f"{INDEX}/{DATA_NAME}", src_dir_fd=pool_fd, dst_dir_fd=pool_fd
    )
    with contextlib.ExitStack() as stack:
        fd = syscalls.open(INDEX, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pool_fd)
        stack.callback(syscalls.close, fd)
        syscalls.fsync(fd)
