"""Where a file's blocks lie on the drive, as FIEMAP tells (linux/fiemap.h)."""

import fcntl
import struct
from typing import Final, NamedTuple

_FS_IOC_FIEMAP: Final = 0xC020660B
_FLAG_SYNC: Final = 1
_HEAD: Final = struct.Struct("=QQIIII")
_EXTENT: Final = struct.Struct("=QQQQQIIII")
_EXTENTS_MAX: Final = 512


class Run(NamedTuple):
    """Neighbouring blocks: where in the file, where on the drive, how many bytes."""

    logical_bytes: int
    physical_bytes: int
    length_bytes: int


def runs_of(fd: int) -> list[Run]:
    """Return the runs of blocks that the file holds, written back first, neighbours joined.

    Written and unwritten neighbours are two extents to XFS but one run on the drive.
    """
    raw = bytearray(_HEAD.size + _EXTENTS_MAX * _EXTENT.size)
    _HEAD.pack_into(raw, 0, 0, (1 << 64) - 1, _FLAG_SYNC, 0, _EXTENTS_MAX, 0)
    fcntl.ioctl(fd, _FS_IOC_FIEMAP, raw, True)
    runs: list[Run] = []
    for index in range(_HEAD.unpack_from(raw)[3]):
        run = Run(*_EXTENT.unpack_from(raw, _HEAD.size + index * _EXTENT.size)[:3])
        last = runs[-1] if runs else None
        if last and last.physical_bytes + last.length_bytes == run.physical_bytes:
            runs[-1] = last._replace(length_bytes=last.length_bytes + run.length_bytes)
        else:
            runs.append(run)
    return runs
