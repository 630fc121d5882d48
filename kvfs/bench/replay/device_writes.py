"""What the block layer has written to a device, by its counters in sysfs, and what still fits.

These count discards and flushes separately. A loop device counts what its file system sends it,
whatever its backing file makes of that.
"""

import os
import stat

from kvfs.machine.drives import written_bytes as written_to


def written_bytes(path: str) -> int | None:
    """Return what was written so far to the block device *path*, or to the one that *path* lies on.

    None if there is no such device or it does not count: tmpfs, overlayfs, btrfs.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return written_to(found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev)


def free_bytes(directory: str) -> int:
    """Return how many bytes the file system of *directory* can still take."""
    totals = os.statvfs(directory)
    return totals.f_bavail * totals.f_frsize
