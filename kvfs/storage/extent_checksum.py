"""The CRC32C of an extent's bytes, from the page cache or from the device.

The checksum of a stored block is made from the page cache, without a read: if a page has left the
cache, the block gets none, unless the settings ask for it. Verification reads by O_DIRECT, past the
page cache, to see what the device holds. ``crc32c`` releases the interpreter lock in each piece.
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

#: Bytes read at a time: a piece is still in the core's cache when its checksum is computed.
CHECKED_PIECE_BYTES: Final = 1 << 20
#: The file system does not support RWF_NOWAIT or O_DIRECT.
_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


def new_buffer() -> mmap.mmap:
    """Return a buffer for one piece, page-aligned for O_DIRECT."""
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
    """Return the CRC32C of the first *size_bytes* of *fd*; None if a byte is not in memory.

    Gives up with None at *end_s* (monotonic). *in_memory*: the file system keeps all files in
    memory; it is tmpfs, which lacks RWF_NOWAIT. Raises OSError.
    """
    # RWF_NOWAIT (preadv2(2)) fails instead of reading from the device.
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
    """Makes checksums of blocks of one pool that are durable and that nobody writes."""

    def __init__(self, syscalls: Syscalls, *, in_memory: bool, reads_device: bool) -> None:
        """*in_memory*: the file system keeps its files in memory (tmpfs).

        *reads_device*: read what is not in the page cache, such as a block stored by O_DIRECT.
        """
        self._syscalls = syscalls
        self._in_memory = in_memory
        self._reads_device = reads_device

    def of(self, fd: int, size_bytes: int, buffer: mmap.mmap, end_s: float) -> int | None:
        """Return the CRC32C of the first *size_bytes* of *fd*; None if that takes until *end_s*.

        None also without *reads_device* if a byte is not in memory. May set O_DIRECT on *fd*, which
        nobody else may use. It blocks. Raises OSError.
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

    *fd* is open with O_DIRECT where that is possible. None if the file is shorter, or at *end_s*
    (monotonic). Raises OSError if the device cannot read them.
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
