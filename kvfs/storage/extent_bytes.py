"""What an extent's file holds: where it has blocks, and the CRC32C of its bytes.

Where it has blocks its file system tells (FIEMAP, linux/fiemap.h). SEEK_HOLE cannot: it reports
allocated but unwritten blocks as holes.

The checksum of a stored block is made from the page cache, without a read: if a page has left the
cache, the block gets none, unless the settings ask for it. Verification reads by O_DIRECT, past the
page cache, to see what the device holds. ``crc32c`` releases the interpreter lock in each piece.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.checksum import crc32c
from kvfs.core.types import PAGE_BYTES
from kvfs.storage.syscalls import Syscalls

#: _IOWR('f', 11, struct fiemap).
_FS_IOC_FIEMAP: Final = 0xC020660B
#: fm_start, fm_length, fm_flags, fm_mapped_extents, fm_extent_count, reserved.
_HEAD: Final = struct.Struct("=QQIIII")
#: fe_logical, fe_physical, fe_length, reserved (2), fe_flags, reserved (3).
_RUN: Final = struct.Struct("=QQQ16xI12x")
_RUN_IS_LAST: Final = 0x1
_RUN_IS_UNWRITTEN: Final = 0x800
#: Runs fetched at a time: 14 KiB.
_RUNS_AT_ONCE: Final = 256


class Range(NamedTuple):
    """A part of a file, in bytes."""

    start_bytes: int
    end_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.end_bytes - self.start_bytes


def _runs(
    syscalls: Syscalls, fd: int, start_bytes: int, end_bytes: int
) -> Iterator[tuple[Range, int]]:
    """Yield the runs of blocks that overlap the range between the offsets, uncut, and their flags.

    Delayed allocations count as blocks: XFS allocates them when it writes the bytes.
    """
    raw = bytearray(_HEAD.size + _RUNS_AT_ONCE * _RUN.size)
    while start_bytes < end_bytes:
        _HEAD.pack_into(raw, 0, start_bytes, end_bytes - start_bytes, 0, 0, _RUNS_AT_ONCE, 0)
        syscalls.ioctl(fd, _FS_IOC_FIEMAP, raw)
        runs = _HEAD.unpack_from(raw)[3]
        flags = 0
        for number in range(runs):
            logical_bytes, _, size_bytes, flags = _RUN.unpack_from(
                raw, _HEAD.size + number * _RUN.size
            )
            start_bytes = logical_bytes + size_bytes
            yield Range(logical_bytes, start_bytes), flags
        if runs < _RUNS_AT_ONCE or flags & _RUN_IS_LAST:
            return


def gaps(syscalls: Syscalls, fd: int, start_bytes: int, end_bytes: int) -> Iterator[Range]:
    """Yield the ranges between the two offsets that hold no blocks, in order.

    Raises OSError; EOPNOTSUPP if the file system has no FIEMAP (tmpfs).
    """
    for run, _ in _runs(syscalls, fd, start_bytes, end_bytes):
        if run.start_bytes > start_bytes:
            yield Range(start_bytes, run.start_bytes)
        start_bytes = run.end_bytes
    if start_bytes < end_bytes:
        yield Range(start_bytes, end_bytes)


def missing(syscalls: Syscalls, fd: int, start_bytes: int, end_bytes: int) -> list[Range]:
    """Return the ranges between the two offsets to allocate: all of it without FIEMAP.

    So it is in memory, where what is there already costs nothing. Raises OSError.
    """
    try:
        return list(gaps(syscalls, fd, start_bytes, end_bytes))
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return [Range(start_bytes, end_bytes)]


def unwritten(syscalls: Syscalls, fd: int, end_bytes: int) -> Iterator[Range]:
    """Yield the ranges up to *end_bytes* that are allocated and not written to the device.

    The page cache may have bytes of them. Without FIEMAP, yield the whole range. Raises OSError.
    """
    try:
        for run, flags in _runs(syscalls, fd, 0, end_bytes):
            if flags & _RUN_IS_UNWRITTEN:
                yield Range(run.start_bytes, min(run.end_bytes, end_bytes))
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        yield Range(0, end_bytes)


def lacks_bytes(syscalls: Syscalls, fd: int, end_bytes: int) -> bool:
    """Whether a part of the file *fd* before *end_bytes* was never written; it may block.

    SEEK_HOLE alone is not enough: reserved blocks count as data once they were read
    (mapping_seek_hole_data, mm/filemap.c). Raises OSError.
    """
    try:
        if next(gaps(syscalls, fd, 0, end_bytes), None) is not None:
            return True
        if next(unwritten(syscalls, fd, end_bytes), None) is None:
            return False
        syscalls.fdatasync(fd)  # the page cache may have bytes for the unwritten ranges
        return next(unwritten(syscalls, fd, end_bytes), None) is not None
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return syscalls.lseek(fd, 0, os.SEEK_HOLE) < end_bytes if end_bytes else False


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
