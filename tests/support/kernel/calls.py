"""System calls that Python's ``os`` lacks, and the one way tests state which errno they expect."""

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

# linux/fs.h and linux/falloc.h.
RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2
RENAME_WHITEOUT: Final = 4
FALLOC_KEEP_SIZE: Final = 1
FALLOC_PUNCH_HOLE: Final = 2
FALLOC_COLLAPSE_RANGE: Final = 8
FALLOC_ZERO_RANGE: Final = 16
#: linux/fcntl.h: the directory of a relative path is the working directory.
AT_FDCWD: Final = -100
#: The file is the descriptor's itself.
AT_EMPTY_PATH: Final = 0x1000
#: utimensat(2): leave the time alone, or take the kernel's clock.
UTIME_NOW: Final = (1 << 30) - 1
UTIME_OMIT: Final = (1 << 30) - 2

_libc: Final = ctypes.CDLL(None, use_errno=True)
_DIRENT_HEAD: Final = struct.Struct("=QqHB")
_TIMESPEC: Final = struct.Struct("qq")

AnyPath = str | bytes | Path


class Row(NamedTuple):
    """One row of a directory as getdents64(2) returns it; ``cookie`` seeks behind the row."""

    ino: int
    cookie: int
    kind: int
    name: bytes


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def renameat2(old: AnyPath, new: AnyPath, flags: int) -> None:
    """rename(2) with flags."""
    _check(_libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags))


def linkat(old: int, new: AnyPath) -> None:
    """Give the file behind descriptor *old* a name: linkat(2) with AT_EMPTY_PATH."""
    _check(_libc.linkat(old, b"", AT_FDCWD, os.fsencode(new), AT_EMPTY_PATH))


def fallocate(fd: int, mode: int, offset_bytes: int, size_bytes: int) -> None:
    """fallocate(2) itself, without glibc's emulation."""
    _check(_libc.fallocate(fd, mode, ctypes.c_long(offset_bytes), ctypes.c_long(size_bytes)))


def getdents(fd: int, room_bytes: int = 32768) -> list[Row]:
    """Read the next rows of an open directory; an empty list is its end."""
    buffer = ctypes.create_string_buffer(room_bytes)
    filled = _check(_libc.getdents64(fd, buffer, ctypes.c_size_t(room_bytes)))
    rows = []
    at = 0
    while at < filled:
        ino, cookie, length, kind = _DIRENT_HEAD.unpack_from(buffer, at)
        name = ctypes.string_at(ctypes.addressof(buffer) + at + _DIRENT_HEAD.size)
        rows.append(Row(ino, cookie, kind, name))
        at += length
    return rows


def list_directory(path: AnyPath, room_bytes: int = 32768) -> list[Row]:
    """Read a whole directory, ``.`` and ``..`` included, *room_bytes* at a time."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        rows: list[Row] = []
        while batch := getdents(fd, room_bytes):
            rows += batch
        return rows
    finally:
        os.close(fd)


def listxattr_into(path: AnyPath, room_bytes: int) -> int:
    """Return how many bytes listxattr(2) filled in, or with 0 how many it would."""
    buffer = ctypes.create_string_buffer(max(room_bytes, 1))
    return _check(_libc.listxattr(os.fsencode(path), buffer, ctypes.c_size_t(room_bytes)))


def utimensat(path: AnyPath, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """Set both times as (seconds, nanoseconds), where UTIME_NOW and UTIME_OMIT are allowed."""
    times = _TIMESPEC.pack(*atime) + _TIMESPEC.pack(*mtime)
    _check(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, 0))


@contextlib.contextmanager
def refused(*expected: int) -> Iterator[None]:
    """Assert that the body fails with one of the *expected* errno values."""
    got = "success"
    try:
        yield
    except OSError as error:
        got = errno.errorcode.get(error.errno or 0, str(error))
    names = [errno.errorcode[number] for number in expected]
    assert got in names, f"expected {'/'.join(names)}, got {got}"


@contextlib.contextmanager
def tolerated(*allowed: int) -> Iterator[None]:
    """Let the body fail with one of the *allowed* errno values, or succeed."""
    try:
        yield
    except OSError as error:
        if error.errno not in allowed:
            raise


@contextlib.contextmanager
def opened(
    path: AnyPath, flags: int, mode: int = 0o644, *, dir_fd: int | None = None
) -> Iterator[int]:
    """Yield a descriptor and close it."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def write_file(path: AnyPath, data: bytes) -> None:
    """Create or empty *path* and write *data* in one go, as a connector does."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]


def read_file(path: AnyPath) -> bytes:
    """Return the whole content of *path* by plain reads."""
    with opened(path, os.O_RDONLY) as fd:
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)
