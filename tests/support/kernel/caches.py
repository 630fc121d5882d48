"""What the kernel remembers of one mount, forgotten; other tests keep what it has of theirs."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

from tests.support.mounts.mounting import Mounted

# Numbers of the system calls (x86-64 and all later tables), and of the command (linux/mount.h).
_FSCONFIG: Final = 431
_FSPICK: Final = 433
_AT_FDCWD: Final = -100
_FSCONFIG_CMD_RECONFIGURE: Final = 7

_libc = ctypes.CDLL(None, use_errno=True)


def forget_names(mountpoint: Path) -> None:
    """Forget the names and inodes of the file system at *mountpoint*, but for those in use.

    A reconfiguration that changes nothing does (fs/super.c, reconfigure_super).
    """
    fd = _libc.syscall(_FSPICK, _AT_FDCWD, os.fsencode(mountpoint), 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "fspick", str(mountpoint))
    try:
        if _libc.syscall(_FSCONFIG, fd, _FSCONFIG_CMD_RECONFIGURE, None, None, 0) != 0:
            raise OSError(ctypes.get_errno(), "fsconfig", str(mountpoint))
    finally:
        os.close(fd)


def forget_pages(file: Path | int) -> None:
    """Forget the pages of *file* that are written back and not mapped."""
    fd = os.open(file, os.O_RDONLY | os.O_NOATIME) if isinstance(file, Path) else file
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        if fd != file:
            os.close(fd)


def forget_blocks(mount: Mounted) -> None:
    """Forget *mount*'s names, and the pages of its blocks: the next load is one from the drive.

    Its file system has no mountpoint; the server's descriptors lead there. What is dirty stays.
    """
    forget_names(mount.path)
    extents = [file for file in (pool_root(mount) / "extents").rglob("*") if file.is_file()]
    assert extents
    for extent in extents:
        # The server removes what was deleted a moment ago.
        with contextlib.suppress(FileNotFoundError):
            forget_pages(extent)


def pool_root(mount: Mounted) -> Path:
    """Return a way to the root of the file system that *mount*'s server has for itself."""
    descriptors = Path(f"/proc/{mount.server_pid}/fd")
    for link in descriptors.iterdir():
        if os.readlink(link) == "/" and (link / "extents").is_dir():
            return link
    raise AssertionError("the server has no file system of its own")
