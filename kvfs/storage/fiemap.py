"""Where a file has blocks, from its file system (FIEMAP, linux/fiemap.h).

SEEK_HOLE cannot tell: it reports allocated but unwritten blocks as holes.
"""

import errno
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

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
_RUNS_MAX: Final = 256


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
    raw = bytearray(_HEAD.size + _RUNS_MAX * _RUN.size)
    while start_bytes < end_bytes:
        _HEAD.pack_into(raw, 0, start_bytes, end_bytes - start_bytes, 0, 0, _RUNS_MAX, 0)
        syscalls.ioctl(fd, _FS_IOC_FIEMAP, raw)
        runs = _HEAD.unpack_from(raw)[3]
        flags = 0
        for number in range(runs):
            logical_bytes, _, size_bytes, flags = _RUN.unpack_from(
                raw, _HEAD.size + number * _RUN.size
            )
            start_bytes = logical_bytes + size_bytes
            yield Range(logical_bytes, start_bytes), flags
        if runs < _RUNS_MAX or flags & _RUN_IS_LAST:
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
