"""File handles (open_by_handle_at(2)), as a server on this machine takes and opens them."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_AT_FDCWD: Final = -100
_HANDLE_MAX_BYTES: Final = 128
_HEAD: Final = struct.Struct("Ii")
#: Of fs/fuse/inode.c, FILEID_INO64_GEN: the upper half of the node id, the lower, the generation.
_FUSE_HANDLE: Final = struct.Struct("III")
_libc: Final = ctypes.CDLL(None, use_errno=True)


class FileHandle(NamedTuple):
    """struct file_handle: what it stands for only the kernel knows."""

    kind: int
    raw: bytes

    @classmethod
    def of(cls, path: Path) -> "FileHandle":
        """Return what name_to_handle_at(2) gives. Raises OSError."""
        given = ctypes.create_string_buffer(_HEAD.pack(_HANDLE_MAX_BYTES, 0), _HEAD.size + 128)
        mount_id = ctypes.c_int()
        where = _AT_FDCWD, os.fsencode(path)
        if _libc.name_to_handle_at(*where, given, ctypes.byref(mount_id), 0) != 0:
            raise OSError(ctypes.get_errno(), "name_to_handle_at")
        length, kind = _HEAD.unpack_from(given.raw)
        return cls(kind, given.raw[_HEAD.size : _HEAD.size + length])

    @property
    def node(self) -> tuple[int, int]:
        """The node id and the generation in a handle of FUSE."""
        high, low, generation = _FUSE_HANDLE.unpack(self.raw)
        return high << 32 | low, generation

    def at(self, node: int, generation: int) -> "FileHandle":
        """Return a handle like this one of another node, as anybody may make one up."""
        raw = _FUSE_HANDLE.pack(node >> 32, node & 0xFFFFFFFF, generation)
        return self._replace(raw=raw)

    def open(self, root_fd: int, flags: int = os.O_RDONLY) -> int:
        """Open it on the mount that *root_fd* lies on. Raises OSError."""
        given = ctypes.create_string_buffer(_HEAD.pack(len(self.raw), self.kind) + self.raw)
        fd = int(_libc.open_by_handle_at(root_fd, given, flags | os.O_CLOEXEC))
        if fd < 0:
            raise OSError(ctypes.get_errno(), "open_by_handle_at")
        return fd

    def read(self, root_fd: int) -> bytes:
        """Return the bytes of the file. Raises OSError."""
        fd = self.open(root_fd)
        with open(fd, "rb") as file:
            return file.read()


@contextlib.contextmanager
def opened_by(handle: FileHandle, root_fd: int) -> Iterator[int]:
    """Open *handle* for the duration of the body. Raises OSError."""
    fd = handle.open(root_fd)
    try:
        yield fd
    finally:
        os.close(fd)
