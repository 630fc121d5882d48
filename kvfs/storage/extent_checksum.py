"""The CRC32C of an extent's bytes: made from the page cache, or read from the device.

What is made of a store costs no read: a page that has left the cache ends it, unless the user has
asked for more. What verifies reads by O_DIRECT, past the page cache, so that it sees what the
device holds. The ``crc32c`` package releases the interpreter lock during each piece.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import time
from typing import Final

from kvfs.core.checksum import crc32c
from kvfs.core.types import PAGE_BYTES
from kvfs.storage.syscalls import Syscalls

#: Read at a time: it stays in a core's cache until it is summed.
CHECKED_PIECE_BYTES: Final = 1 << 20
#: The file system cannot read without waiting, or not past the cache.
_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


def new_buffer() -> mmap.mmap:
    """Return a buffer for one piece, which O_DIRECT may use: it begins with a page."""
    return mmap.mmap(-1, CHECKED_PIECE_BYTES)


def cached_crc(
    syscalls: Syscalls,
    fd: int,
    size_bytes: int,
    buffer: mmap.mmap,
    end_s: float,
    *,
    in_memory: bool = False,
) -> int | None:
    """Return the CRC32C of the first *size_bytes* of *fd*; None if one of them is not in memory.

    None also at *end_s* (monotonic). *in_memory*: all files are, on tmpfs, which does not know
    RWF_NOWAIT. Raises OSError.
    """
    # RWF_NOWAIT (preadv2(2)): what would have to be read from the device is not read.
    flags = 0 if in_memory else os.RWF_NOWAIT
    crc, at_bytes = 0, 0
    view = memoryview(buffer)
    while at_bytes < size_bytes:
        if time.monotonic() >= end_s:
            return None
        wanted = view[: min(CHECKED_PIECE_BYTES, size_bytes - at_bytes)]
        try:
            read_bytes = syscalls.preadv(fd, [wanted], at_bytes, flags)
        except OSError as error:
            if error.errno == errno.EAGAIN or error.errno in _CANNOT:
                return None
            raise
        if not read_bytes:
            return None
        crc = crc32c(wanted[:read_bytes], crc)
        at_bytes += read_bytes
    return crc


class FinalChecksum:
    """The checksum of blocks of one pool that nobody writes, and that are durable."""

    def __init__(self, syscalls: Syscalls, *, in_memory: bool, reads_device: bool) -> None:
        """*in_memory*: the file system keeps its files in memory (tmpfs).

        *reads_device*: what is not in the page cache, such as a block stored by O_DIRECT, is read.
        """
        self._syscalls = syscalls
        self._in_memory = in_memory
        self._reads_device = reads_device

    def of(self, fd: int, size_bytes: int, buffer: mmap.mmap, end_s: float) -> int | None:
        """Return the CRC32C of the first *size_bytes* of *fd*, None as ``cached_crc``; it blocks.

        Once the device is read, *fd*, which is ours alone, has O_DIRECT. Raises OSError.
        """
        syscalls = self._syscalls
        crc = cached_crc(syscalls, fd, size_bytes, buffer, end_s, in_memory=self._in_memory)
        if crc is not None or not self._reads_device:
            return crc
        with contextlib.suppress(OSError):  # else it is read through the cache
            flags = syscalls.fcntl(fd, fcntl.F_GETFL)
            syscalls.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return device_crc(syscalls, fd, size_bytes, buffer, end_s)


def device_crc(
    syscalls: Syscalls,
    fd: int,
    size_bytes: int,
    buffer: mmap.mmap,
    end_s: float = float("inf"),
) -> int | None:
    """Return the CRC32C of the first *size_bytes* as the device has them; it blocks.

    *fd* is opened with O_DIRECT where that is possible. None if the file is shorter, and at *end_s*
    (monotonic). Raises OSError: a device that cannot read them.
    """
    crc, at_bytes = 0, 0
    view = memoryview(buffer)
    while at_bytes < size_bytes:
        if time.monotonic() >= end_s:
            return None
        left_bytes = min(CHECKED_PIECE_BYTES, size_bytes - at_bytes)
        rounded_bytes = -(-left_bytes // PAGE_BYTES) * PAGE_BYTES
        read_bytes = min(syscalls.preadv(fd, [view[:rounded_bytes]], at_bytes), left_bytes)
        if not read_bytes:
            return None
        crc = crc32c(view[:read_bytes], crc)
        at_bytes += read_bytes
    return crc
