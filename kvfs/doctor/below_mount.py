"""Files hidden by a mount: stored in its directory while nothing was mounted there.

They take space on the file system below, unseen. A clone of the mount below, without the mounts
inside it, shows the directory itself (open_tree(2)). No file on a FUSE mount is ever touched.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from typing import Final

from kvfs.core.sizes import format_size
from kvfs.core.types import STAT_BLOCK_BYTES
from kvfs.devices.detached import clone_of_mount
from kvfs.doctor.facts import Below
from kvfs.machine.mount_table import FS_TYPE, mounts
from kvfs.storage.fan_out import DIRECTORY_FLAGS

#: Bounds of the count, because a mount waits for it: about what a drive lists in a second.
_FILES_MAX: Final = 100_000
_LOOK_MAX_S: Final = 1.0


def below(mountpoint: str) -> Below | None:
    """Count the files below the mount at *mountpoint*, or in the directory itself without one.

    Stops at 100,000 files or after a second. None if they cannot be seen (``uncovered``).
    """
    try:
        with uncovered(mountpoint) as place:
            return None if place is None else _count(*place)
    except OSError:
        return None


@contextlib.contextmanager
def uncovered(mountpoint: str) -> Iterator[tuple[int, str] | None]:
    """Yield the directory below the mount at *mountpoint* as its parent's descriptor and its name.

    Without a mount it is the directory itself. None if it cannot be seen: without privilege, or
    with another file system in between. The directory lies on a local file system.
    """
    covering = [mount.fs_type for mount in mounts() if mount.mountpoint == mountpoint]
    if not covering or covering[-1] != FS_TYPE:
        path, name = mountpoint, "."
    elif set(covering) == {FS_TYPE}:
        path, name = os.path.split(mountpoint)
    else:
        yield None
        return
    try:
        tree_fd = clone_of_mount(path)
    except OSError:
        yield None
        return
    try:
        yield tree_fd, name
    finally:
        os.close(tree_fd)


def told(found: Below | None) -> str:
    """Return the files and their size in words; "" if there are none, or none could be seen."""
    if found is None or not found.files:
        return ""
    at_least = "" if found.is_whole else "at least "
    files = "1 file" if found.files == 1 else f"{found.files:,} files"
    return f"{at_least}{files} of {format_size(found.size_bytes)}"


def _count(tree_fd: int, top: str) -> Below:
    files = size_bytes = 0
    until_s = time.monotonic() + _LOOK_MAX_S
    device = os.stat(top, dir_fd=tree_fd).st_dev
    directories = [top]
    while directories:
        directory = directories.pop()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # removed meanwhile
            fd = os.open(directory, DIRECTORY_FLAGS, dir_fd=tree_fd)
            stack.callback(os.close, fd)
            for found in stack.enter_context(os.scandir(fd)):
                if files >= _FILES_MAX or time.monotonic() > until_s:
                    return Below(files, size_bytes, is_whole=False)
                status = found.stat(follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    files += 1
                    size_bytes += status.st_blocks * STAT_BLOCK_BYTES
                elif status.st_dev == device:
                    directories.append(f"{directory}/{found.name}")
    return Below(files, size_bytes, is_whole=True)
