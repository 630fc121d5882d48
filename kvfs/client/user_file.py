"""Reading a file that the user names, without waiting on a pipe."""

import errno
import os
import stat
from typing import Final

#: /dev/null (Documentation/admin-guide/devices.txt).
_NULL: Final = os.makedev(1, 3)
#: Files that the caller's shell has opened already: ``--config <(command)``.
_OPEN_ALREADY: Final = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


def read_file(path: str, most_bytes: int = -1) -> bytes:
    """Return at most *most_bytes* of *path*. Raises OSError, also if it is not a file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) and found.st_rdev != _NULL:
            if not path.startswith(_OPEN_ALREADY):
                raise OSError(errno.EINVAL, "is not a regular file")
            os.set_blocking(fd, True)
        with open(fd, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(fd)
