"""The calls of a client whose mount is never down: none fails, and how long each took is known.

Python tries a call again that ends with EINTR (PEP 475), so that a program would never learn of
one. Here the calls that it does so with are made by libc itself.
"""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

#: Shorter calls are no pause that somebody would notice.
LONG_S: Final = 0.05
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_LIBC.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_LIBC.ftruncate.argtypes = (ctypes.c_int, ctypes.c_int64)
_LIBC.write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_LIBC.write.restype = _LIBC.pwrite.restype = _LIBC.pread.restype = ctypes.c_ssize_t
#: Of module ``os``, what reaches a mount and is not tried again by Python.
_TIMED: Final = (
    *("close", "rename", "unlink", "stat", "lstat", "listdir", "mkdir", "rmdir", "symlink"),
    *("readlink", "mkfifo", "setxattr", "getxattr", "removexattr", "truncate", "utime", "chmod"),
)

Call = Callable[..., Any]


def _checked(result: int, what: object) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(what))
    return result


def _open(path: str, flags: int, mode: int = 0o777) -> int:
    return _checked(_LIBC.open(os.fsencode(path), flags | os.O_CLOEXEC, mode), path)


def _pwrite(fd: int, data: memoryview, at: int) -> int:
    whole = np.frombuffer(data, np.uint8)  # gives the address of what may only be read, too
    return _checked(_LIBC.pwrite(fd, whole.ctypes.data, whole.size, at), fd)


def _write(fd: int, data: bytes) -> int:
    return _checked(_LIBC.write(fd, data, len(data)), fd)


def _pread(fd: int, size_bytes: int, at: int) -> bytes:
    whole = bytearray(size_bytes)
    return bytes(whole[: _preadv(fd, [whole], at)])


def _preadv(fd: int, buffers: list[Any], at: int) -> int:
    (buffer,) = buffers
    whole = np.frombuffer(buffer, np.uint8)
    return _checked(_LIBC.pread(fd, whole.ctypes.data, whole.size, at), fd)


def _ftruncate(fd: int, size_bytes: int) -> None:
    _checked(_LIBC.ftruncate(fd, size_bytes), fd)


class CallClock:
    """Times each call of this process."""

    def __init__(self) -> None:
        self.calls = 0
        #: When a call began that took long, when it ended, and which; monotonic.
        self.long: list[tuple[float, float, str]] = []

    def install(self) -> None:
        """Time the functions of module ``os`` from now on."""
        calls: dict[str, Call] = {
            "open": _open,
            "pwrite": _pwrite,
            "preadv": _preadv,
            "ftruncate": _ftruncate,
        }
        calls |= {"write": _write, "pread": _pread, **{name: getattr(os, name) for name in _TIMED}}
        for name, call in calls.items():
            setattr(os, name, self._timed(name, call))

    def _timed(self, name: str, call: Call) -> Call:
        def timed(*arguments: object, **named: object) -> object:
            began_s = time.monotonic()
            try:
                return call(*arguments, **named)
            finally:
                self.calls += 1
                ended_s = time.monotonic()
                if ended_s - began_s >= LONG_S:
                    self.long.append((began_s, ended_s, name))

        return timed
