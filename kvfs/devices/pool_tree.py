"""The directories and files of a pool directory: made, counted and removed.

Everything is reached through ``pool_fd``, since a detached mount has no path.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Final

from kvfs.core.errors import CommandError
from kvfs.core.pool_layout import (
    COPIES,
    DATA_NAME,
    FAN_OUTS,
    FILES,
    INDEX,
    INDEXES,
    LOCK,
    LOCK_NAME,
    LOG,
    POOL,
    QUARANTINE,
    STRAYS,
    fan_out_directories,
    parse_file_name,
    parse_log_file_name,
)
from kvfs.core.types import STAT_BLOCK_BYTES
from kvfs.devices.pool_files import read_header

#: mkfs.ext4 makes it in every new file system, so it does not count as data.
_LOST_FOUND: Final = "lost+found"
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def make_tree(pool_fd: int) -> None:
    """Make the directories of a new pool, if they are missing. Raises OSError."""
    for top in (INDEX, *FAN_OUTS):
        _make_directory(top, pool_fd)
    for top in FAN_OUTS:
        for directory in fan_out_directories(top):
            _make_directory(directory, pool_fd)


def _make_directory(path: str, pool_fd: int) -> None:
    """Make *path*, if missing: ``remove_tree`` keeps directories that hold other files."""
    try:
        os.mkdir(path, 0o700, dir_fd=pool_fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(path, dir_fd=pool_fd, follow_symlinks=False).st_mode):
            raise


def foreign_names(pool_fd: int) -> list[str]:
    """Return the names in *pool_fd* that do not belong to a pool."""
    own = {POOL, *FILES, *INDEXES, LOG, *FAN_OUTS, QUARANTINE, STRAYS, _LOST_FOUND}
    return sorted(set(os.listdir(pool_fd)) - own)


def own_names(pool_fd: int) -> list[str]:
    """Return the names in *pool_fd* that belong to a pool, finished or not."""
    return sorted(set(os.listdir(pool_fd)) - {_LOST_FOUND, *foreign_names(pool_fd)})


def remove_tree(pool_fd: int, *, keep_lock: bool = False) -> None:
    """Remove a pool's own files, the header first: without it the rest is not a pool.

    *keep_lock* keeps LOCK, for a new pool in the same place. Other files stay, and so do
    directories that hold any. Raises OSError.
    """
    from kvfs.storage.index_place import forget_index  # LMDB, which few commands need

    header = None
    with contextlib.suppress(CommandError):
        header = read_header(pool_fd, POOL)
    if header is None or not header.is_removed:  # else its pool may go on
        forget_index(pool_fd)
    _unlink(POOL, pool_fd)
    os.fsync(pool_fd)
    for directory in _own_directories():
        for directory_fd, name in _own_files(directory, pool_fd):
            _unlink(name, directory_fd)
        _rmdir(directory, pool_fd)
    for top in FAN_OUTS:
        _rmdir(top, pool_fd)
    for name in FILES:
        if name != LOCK or not keep_lock:
            _unlink(name, pool_fd)
    os.fsync(pool_fd)


def held_bytes(pool_fd: int) -> int:
    """Return about how many bytes ``remove_tree`` would free: the blocks of a pool's own files.

    It calls stat(2) on each file, which takes less time than removing it. Raises OSError.
    """
    found = 0
    for directory in _own_directories():
        for directory_fd, name in _own_files(directory, pool_fd):
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            found += status.st_blocks * STAT_BLOCK_BYTES
    return found


def _own_directories() -> Iterator[str]:
    for top in FAN_OUTS:
        yield from fan_out_directories(top)
    yield from (*INDEXES, LOG, QUARANTINE, STRAYS)


def _own_files(directory: str, pool_fd: int) -> Iterator[tuple[int, str]]:
    """Yield the pool's own files in *directory*, if it exists, each with an fd of the directory."""
    try:
        fd = os.open(directory, _OPEN_DIRECTORY, dir_fd=pool_fd)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        for name in os.listdir(fd):
            if _is_own_file(directory, name):
                yield fd, name
    finally:
        os.close(fd)


def _is_own_file(directory: str, name: str) -> bool:
    if directory in INDEXES:
        return name in (DATA_NAME, LOCK_NAME)
    if directory == LOG:
        return name in COPIES or parse_log_file_name(name) is not None
    return parse_file_name(name) is not None


def _unlink(name: str, directory_fd: int) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=directory_fd)


def _rmdir(path: str, pool_fd: int) -> None:
    # OSError: it is not empty (it holds other files), or not a directory of the pool at all.
    with contextlib.suppress(OSError):
        os.rmdir(path, dir_fd=pool_fd)
