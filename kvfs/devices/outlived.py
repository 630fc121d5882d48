"""An XFS that outlived its server: clients of the dead mount still have files on it open.

It is not mounted on any path. A second mount of its device joins it (get_tree_bdev in fs/super.c),
with its page cache and its log. The pool's lock decides which of two servers may have the pool.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from kvfs.devices import busy

#: Each mounted XFS has this file, by its device's name; Documentation/ABI/testing/sysfs-fs-xfs.
_XFS_IN_SYSFS: Final = "/sys/fs/xfs/{}/log/log_head_lsn"


class Outlived:
    """A file system that outlived its server; can tell whether it is still mounted."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def is_gone(self) -> bool:
        """Whether it was unmounted since; its file in sysfs ends then. Raises OSError."""
        try:
            return not os.pread(self._fd, 1, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return True


@contextlib.contextmanager
def outlived(block_path: str) -> Iterator[Outlived | None]:
    """Yield the XFS on *block_path* if it is mounted by no user that can be found; else None."""
    fd = -1
    if busy.has_unknown_user(block_path):
        with contextlib.suppress(FileNotFoundError):  # not claimed by an XFS, or no sysfs
            fd = os.open(
                _XFS_IN_SYSFS.format(busy.kernel_name(block_path)), os.O_RDONLY | os.O_CLOEXEC
            )
    try:
        yield Outlived(fd) if fd >= 0 else None
    finally:
        if fd >= 0:
            os.close(fd)
