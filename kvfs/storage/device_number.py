"""DEVICE: which device number the pool's mount had last, for the next one to ask for it again.

The minor number in decimal. A hint: a missing or a foreign text means that none is known.
"""

import contextlib
import os
from typing import Final

from kvfs.core.pool_layout import DEVICE, DEVICE_NEW
from kvfs.storage.syscalls import Syscalls

#: include/linux/kdev_t.h, MINORBITS.
_MINOR_MAX: Final = (1 << 20) - 1
_SIZE_MAX_BYTES: Final = 16


def read_device_number(pool_fd: int, syscalls: Syscalls) -> int | None:
    """Return the minor number that the last mount had; None: not known."""
    try:
        fd = syscalls.open(DEVICE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=pool_fd)
    except OSError:
        return None
    try:
        minor = int(syscalls.read(fd, _SIZE_MAX_BYTES))
    except (OSError, ValueError):
        return None
    finally:
        syscalls.close(fd)
    return minor if 0 < minor <= _MINOR_MAX else None


def write_device_number(pool_fd: int, syscalls: Syscalls, minor: int) -> None:
    """Remember *minor*, durably. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = syscalls.open(DEVICE_NEW, flags, 0o600, dir_fd=pool_fd)
    try:
        syscalls.write(fd, b"%d\n" % minor)
        syscalls.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            syscalls.unlink(DEVICE_NEW, dir_fd=pool_fd)
        raise
    finally:
        syscalls.close(fd)
    syscalls.rename(DEVICE_NEW, DEVICE, src_dir_fd=pool_fd, dst_dir_fd=pool_fd)
