"""A removed file and its handle (open_by_handle_at(2)), which NFS servers hold."""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

import pytest

_AT_FDCWD: Final = -100
_HANDLE_MAX_BYTES: Final = 128
_libc: Final = ctypes.CDLL(None, use_errno=True)


def handle_of(path: Path) -> "ctypes.Array[ctypes.c_char]":
    """Return what name_to_handle_at(2) gives."""
    handle = ctypes.create_string_buffer(struct.pack("Ii", _HANDLE_MAX_BYTES, 0), 8 + 128)
    mount_id = ctypes.c_int()
    asked = _libc.name_to_handle_at(_AT_FDCWD, os.fsencode(path), handle, ctypes.byref(mount_id), 0)
    assert asked == 0, os.strerror(ctypes.get_errno())
    return handle


def open_by(handle: "ctypes.Array[ctypes.c_char]", root_fd: int) -> int:
    """Open by handle for reading. Raises OSError."""
    fd = int(_libc.open_by_handle_at(root_fd, handle, os.O_RDONLY))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "open_by_handle_at")
    return fd


@pytest.mark.parametrize("how", ["unlink", "replace"])
def test_a_removed_file_does_not_open_by_its_handle(kv: Path, how: str) -> None:
    """[unlink] ESTALE at once; who looked its name up just before is another matter."""
    path = kv / "block"
    path.write_bytes(b"old")
    path.rename(kv / "final")
    path = kv / "final"
    handle = handle_of(path)
    root_fd = os.open(kv, os.O_RDONLY)
    try:
        fd = open_by(handle, root_fd)
        assert os.read(fd, 9) == b"old"
        os.close(fd)
        if how == "unlink":
            path.unlink()
        else:
            (kv / "next").write_bytes(b"new")
            (kv / "next").rename(path)
        for _ in range(3):
            with pytest.raises(OSError, match="by_handle") as refused:
                open_by(handle, root_fd)
            assert refused.value.errno == errno.ESTALE
    finally:
        os.close(root_fd)
