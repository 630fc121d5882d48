"""A guard on the directory below a mount: nothing can be stored there while nothing is mounted.

It is the immutable flag of the file system (chattr(1), FS_IMMUTABLE_FL), which stops root, too. An
extended attribute says that kvfs set it, so that a flag set by others is never cleared.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Final

from kvfs.storage.fan_out import DIRECTORY_FLAGS

#: linux/fs.h. The kernel reads and writes an int, whatever the name of the call says.
_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_IMMUTABLE_FL: Final = 0x10
_FLAGS: Final = struct.Struct("=i4x")
_MARK: Final = "trusted.kvfs.guard"
#: Errors of ioctl_iflags(2) and xattr(7) calls on file systems that have no such flag.
_NO_FLAG: Final = (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def guard(directory: str, dir_fd: int | None = None) -> str:
    """Let nothing be stored in the empty *directory*; return why it cannot be done, or "".

    *directory* may be relative to *dir_fd*. What it holds stays reachable: a directory that is not
    empty is left as it is.
    """
    try:
        with _opened(directory, dir_fd) as fd:
            flags = _flags_of(fd)
            if flags & _FS_IMMUTABLE_FL:
                return ""
            if os.listdir(fd):
                return "it is not empty"
            os.setxattr(fd, _MARK, b"1")
            try:
                _set_flags(fd, flags | _FS_IMMUTABLE_FL)
            except OSError:
                os.removexattr(fd, _MARK)
                raise
    except OSError as error:
        return _why(error)
    return ""


def unguard(directory: str) -> bool:
    """Undo ``guard``; False if kvfs did not guard *directory*. Raises OSError."""
    with _opened(directory) as fd:
        try:
            os.getxattr(fd, _MARK)
            flags = _flags_of(fd)
        except OSError as error:
            if error.errno in (errno.ENODATA, *_NO_FLAG):
                return False
            raise
        # In this order: the attribute of an immutable directory cannot be removed.
        _set_flags(fd, flags & ~_FS_IMMUTABLE_FL)
        os.removexattr(fd, _MARK)
    return True


@contextlib.contextmanager
def _opened(directory: str, dir_fd: int | None = None) -> Iterator[int]:
    fd = os.open(directory, DIRECTORY_FLAGS, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _flags_of(fd: int) -> int:
    return int(_FLAGS.unpack(fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(_FLAGS.size)))[0])


def _set_flags(fd: int, flags: int) -> None:
    fcntl.ioctl(fd, _FS_IOC_SETFLAGS, _FLAGS.pack(flags))


def _why(error: OSError) -> str:
    if error.errno in _NO_FLAG:
        return "its file system has no immutable flag"
    if error.errno == errno.EPERM:
        return "that needs CAP_LINUX_IMMUTABLE"
    if error.errno == errno.EROFS:  # nothing can be stored there anyway
        return ""
    return error.strerror or str(error)
