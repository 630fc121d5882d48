"""Checks that a request is as long as its kind must be, before libfuse reads it.

libfuse trusts the kernel's lengths and reads past a message that is too short; the next release
of the kernel, or a bug in it, must cost a caller an error and not the mount. Layouts: linux/fuse.h.
"""

import struct
from typing import Final, NamedTuple

from mount.fuse.wire import (
    FLUSH_IN,
    GETXATTR_IN,
    OPEN_IN,
    READ_IN,
    RELEASE_IN,
    SETATTR_IN_BYTES,
    WRITE_IN,
    Opcode,
)

#: The most that one READ, READDIR or WRITE moves: max_pages and max_write of libfuse 3, 1 MiB.
TRANSFER_MAX_BYTES: Final = 1 << 20
#: u32 size in struct fuse_read_in and fuse_write_in, behind fh and offset.
_SIZE: Final = struct.Struct("<16xI")
#: u32 size and flags, struct fuse_setxattr_in before FUSE_SETXATTR_EXT.
_VALUE: Final = struct.Struct("<II")
#: XATTR_CREATE and XATTR_REPLACE of setxattr(2): on any other flag pyfuse3 ends the mount.
_XATTR_FLAGS: Final = 3


class Shape(NamedTuple):
    """The fixed part of a request, and how many names with a terminating zero follow it."""

    fixed_bytes: int
    names: int = 0


SHAPES: Final[dict[int, Shape]] = {
    Opcode.LOOKUP: Shape(0, 1),
    Opcode.GETATTR: Shape(16),
    Opcode.SETATTR: Shape(SETATTR_IN_BYTES),
    Opcode.READLINK: Shape(0),
    Opcode.SYMLINK: Shape(0, 2),
    Opcode.MKNOD: Shape(16, 1),
    Opcode.MKDIR: Shape(8, 1),
    Opcode.UNLINK: Shape(0, 1),
    Opcode.RMDIR: Shape(0, 1),
    Opcode.RENAME: Shape(8, 2),
    Opcode.LINK: Shape(8, 1),
    Opcode.OPEN: Shape(OPEN_IN.size),
    Opcode.READ: Shape(READ_IN.size),
    Opcode.WRITE: Shape(WRITE_IN.size),
    Opcode.STATFS: Shape(0),
    Opcode.RELEASE: Shape(RELEASE_IN.size),
    Opcode.FSYNC: Shape(16),
    Opcode.SETXATTR: Shape(8, 1),
    Opcode.GETXATTR: Shape(GETXATTR_IN.size, 1),
    Opcode.LISTXATTR: Shape(GETXATTR_IN.size),
    Opcode.REMOVEXATTR: Shape(0, 1),
    Opcode.FLUSH: Shape(FLUSH_IN.size),
    # Before Linux 5.17 it ended after flags.
    Opcode.INIT: Shape(16),
    Opcode.OPENDIR: Shape(OPEN_IN.size),
    Opcode.READDIR: Shape(READ_IN.size),
    Opcode.RELEASEDIR: Shape(RELEASE_IN.size),
    Opcode.FSYNCDIR: Shape(16),
    Opcode.ACCESS: Shape(8),
    Opcode.CREATE: Shape(16, 1),
    Opcode.DESTROY: Shape(0),
    Opcode.READDIRPLUS: Shape(READ_IN.size),
    Opcode.RENAME2: Shape(16, 2),
}


def well_formed(opcode: int, body: memoryview) -> bool:
    """Tell whether *body*, what follows the header, holds all that *opcode* promises."""
    shape = SHAPES.get(opcode)
    if shape is None or len(body) < shape.fixed_bytes:
        return False
    if opcode == Opcode.WRITE:
        return bool(len(body) == shape.fixed_bytes + _SIZE.unpack_from(body)[0])
    if opcode in (Opcode.READ, Opcode.READDIR, Opcode.READDIRPLUS):
        return bool(_SIZE.unpack_from(body)[0] <= TRANSFER_MAX_BYTES)
    if not shape.names:
        return True
    return _names_end(bytes(body[shape.fixed_bytes :]), opcode, shape, body)


def _names_end(rest: bytes, opcode: int, shape: Shape, body: memoryview) -> bool:
    """Tell whether *rest* holds every name whole, and behind it the value of a SETXATTR."""
    end = 0
    for _ in range(shape.names):
        end = rest.find(b"\0", end) + 1
        if not end:
            return False
    if opcode != Opcode.SETXATTR:
        return True
    size_bytes, flags = _VALUE.unpack_from(body)
    return bool(len(rest) >= end + size_bytes and flags <= _XATTR_FLAGS)
