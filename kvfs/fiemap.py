"""Where a file holds no blocks, as its file system tells (FIEMAP, linux/fiemap.h).

SEEK_HOLE does not tell: it calls a hole what is allocated and not written.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.syscalls import Syscalls

#: _IOWR('f', 11, struct fiemap).
_FS_IOC_FIEMAP: Final = 0xC020660B
#: fm_start, fm_length, fm_flags, fm_mapped_extents, fm_extent_count, reserved.
_HEAD: Final = struct.Struct("=QQIIII")
#: fe_logical, fe_physical, fe_length, reserved (2), fe_flags, reserved (3).
_RUN: Final = struct.Struct("=QQQ16xI12x")
_RUN_IS_LAST: Final = 0x1
#: Runs told at a time: 14 KiB.
_RUNS_MAX: Final = 256


class Gap(NamedTuple):
    """A range of a file without blocks, in bytes."""

    start_bytes: int
    end_bytes: int


def gaps(syscalls: Syscalls, fd: int, start_bytes: int, end_bytes: int) -> Iterator[Gap]:
    """Yield the ranges between the two offsets that hold no blocks, in order.

    What is promised to bytes in memory counts as held: XFS allocates it when it writes them.
    Raises OSError, EOPNOTSUPP where the file system cannot tell (tmpfs).
    """
    raw = bytearray(_HEAD.size + _RUNS_MAX * _RUN.size)
    at_bytes = start_bytes
    while at_bytes < end_bytes:
        _HEAD.pack_into(raw, 0, at_bytes, end_bytes - at_bytes, 0, 0, _RUNS_MAX, 0)
        syscalls.ioctl(fd, _FS_IOC_FIEMAP, raw)
        runs = _HEAD.unpack_from(raw)[3]
        flags = 0
        for number in range(runs):
            logical_bytes, _, length_bytes, flags = _RUN.unpack_from(
                raw, _HEAD.size + number * _RUN.size
            )
            if logical_bytes > at_bytes:
                yield Gap(at_bytes, min(logical_bytes, end_bytes))
            at_bytes = max(at_bytes, logical_bytes + length_bytes)
        if runs < _RUNS_MAX or flags & _RUN_IS_LAST:
            break
    if at_bytes < end_bytes:
        yield Gap(at_bytes, end_bytes)
