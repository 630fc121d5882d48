"""What the block layer has written to a device, by its counters in sysfs, and what still fits.

Discards and flushes are counted apart there. A loop device counts what its file system sends it,
whatever its backing file makes of that.
"""

import os
import stat
from pathlib import Path
from typing import Final

#: Documentation/block/stat.rst: the seventh value is sectors written, of 512 bytes whatever the
#: device's own are.
_SECTORS_WRITTEN: Final = 6
_SECTOR_BYTES: Final = 512


def written_bytes(path: str) -> int | None:
    """Return what was written so far to the block device *path*, or to the one that *path* lies on.

    None if there is no such device or it does not count: tmpfs, overlayfs, btrfs.
    """
    try:
        found = os.stat(path)
        number = found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev
        counters = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text()
    except OSError:
        return None
    return parse_written(counters)


def parse_written(counters: str) -> int | None:
    """Return the bytes written in the text of ``/sys/block/DEV/stat``, None if it has no such."""
    try:
        return int(counters.split()[_SECTORS_WRITTEN]) * _SECTOR_BYTES
    except (IndexError, ValueError):
        return None


def free_bytes(directory: str) -> int:
    """Return how many bytes the file system of *directory* can still take."""
    totals = os.statvfs(directory)
    return totals.f_bavail * totals.f_frsize
