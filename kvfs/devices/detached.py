"""Detached mounts: they have no path, and live as long as an fd in them is open.

open_tree, fsopen, fsconfig, fsmount and move_mount (Linux 5.2) are called by number. The numbers
are the same on every architecture that kvfs runs on (include/uapi/asm-generic/unistd.h).
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Mapping
from typing import Final

from kvfs.storage.syscalls import LIBC

_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_FSOPEN: Final = 430
_SYS_FSCONFIG: Final = 431
_SYS_FSMOUNT: Final = 432
#: linux/mount.h.
_OPEN_TREE_CLONE: Final = 1
_FSOPEN_CLOEXEC: Final = 1
_FSMOUNT_CLOEXEC: Final = 1
_FROM_THE_FD_ITSELF: Final = 0x04
_FOLLOW_LINKS: Final = 0x10
_BENEATH: Final = 0x200  # Linux 6.5
_AT_FDCWD: Final = -100
_SET_FLAG: Final = 0
_SET_STRING: Final = 1
_CMD_CREATE: Final = 6
_CMD_CREATE_EXCL: Final = 8  # Linux 6.6: never joins a mount that is there already
MOUNT_ATTR_RDONLY: Final = 0x01
MOUNT_ATTR_NOSUID: Final = 0x02
MOUNT_ATTR_NODEV: Final = 0x04
MOUNT_ATTR_NOATIME: Final = 0x10
MOUNT_ATTR_NODIRATIME: Final = 0x80
_LOG_LINE_BYTES: Final = 4096

LIBC.syscall.restype = ctypes.c_long


def mount_detached(
    fs_type: str,
    source: str,
    options: Mapping[str, str],
    flags: Iterable[str],
    attributes: int,
    *,
    joins: bool = False,
) -> int:
    """Mount block device *source* without a path, and return an fd of its root (O_PATH).

    *flags* are options without a value (``ro``), *attributes* are MOUNT_ATTR_*. With *joins*, a
    device that is mounted already gets another mount of the same file system. The mount ends with
    the last fd in it. Raises OSError, with the kernel's own message if there is one.
    """
    context_fd = _call(_SYS_FSOPEN, fs_type.encode(), ctypes.c_uint(_FSOPEN_CLOEXEC))
    try:
        _set(context_fd, _SET_STRING, "source", source)
        for name, value in options.items():
            _set(context_fd, _SET_STRING, name, value)
        for name in flags:
            _set(context_fd, _SET_FLAG, name, None)
        _create(context_fd, joins=joins)
        attributes_word = ctypes.c_uint(attributes)
        return _call(_SYS_FSMOUNT, context_fd, ctypes.c_uint(_FSMOUNT_CLOEXEC), attributes_word)
    except OSError as error:
        raise OSError(error.errno, _reason(context_fd, error)) from None
    finally:
        os.close(context_fd)


def clone_of_mount(path: str) -> int:
    """Return an fd (O_PATH) of the directory *path* in a detached clone of its mount.

    Mounts below it are left out. Raises OSError; EPERM without CAP_SYS_ADMIN.
    """
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    return _call(_SYS_OPEN_TREE, ctypes.c_int(_AT_FDCWD), os.fsencode(path), flags)


def attach(root_fd: int, mountpoint: str) -> None:
    """Put the detached mount of *root_fd*, its root, on top at *mountpoint*. Raises OSError."""
    _move(root_fd, mountpoint, _FROM_THE_FD_ITSELF | _FOLLOW_LINKS)


def attach_beneath(root_fd: int, mountpoint: str) -> bool:
    """Put the detached mount beneath the topmost mount at *mountpoint*, which stays visible.

    Return False if the kernel cannot do that: before Linux 6.5, and in some places
    (can_move_mount_beneath in fs/namespace.c). Raises OSError for other errors, as ``attach``.
    """
    try:
        _move(root_fd, mountpoint, _FROM_THE_FD_ITSELF | _FOLLOW_LINKS | _BENEATH)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _move(root_fd: int, mountpoint: str, flags: int) -> None:
    to = ctypes.c_int(_AT_FDCWD), os.fsencode(mountpoint)
    _call(_SYS_MOVE_MOUNT, ctypes.c_int(root_fd), b"", *to, ctypes.c_uint(flags))


def _create(context_fd: int, *, joins: bool) -> None:
    if not joins:
        try:
            _call(_SYS_FSCONFIG, context_fd, _CMD_CREATE_EXCL, None, None, 0)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        else:
            return
    _call(_SYS_FSCONFIG, context_fd, _CMD_CREATE, None, None, 0)


def _set(context_fd: int, command: int, key: str, value: str | None) -> None:
    raw = None if value is None else os.fsencode(value)
    _call(_SYS_FSCONFIG, context_fd, command, key.encode(), raw, 0)


def _call(number: int, *arguments: object) -> int:
    result = int(LIBC.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error_no = ctypes.get_errno()
        raise OSError(error_no, os.strerror(error_no))
    return result


def _reason(context_fd: int, error: OSError) -> str:
    """Return the last line of the context's log ("e xfs: ..."), else the text of errno."""
    reason = error.strerror or "unknown error"
    with contextlib.suppress(OSError):  # ENODATA: the log has no more lines
        while line := os.read(context_fd, _LOG_LINE_BYTES):
            reason = line.decode(errors="backslashreplace").strip()[2:]
    return reason
