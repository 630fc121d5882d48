"""What is here only because libfuse and pyfuse3 sit between /dev/fuse and our handlers.

They talk to one end of a pair of sockets. Each request or reply is one message (SOCK_SEQPACKET).
READ and WRITE never pass here (mount/requests/data.py), so the largest carries an extended
attribute or a listing: 64 KiB.

libfuse trusts the kernel's lengths and reads past a message that is too short; the next release of
the kernel, or a bug in it, must cost a caller an error and not the mount. So each request is
checked first. Layouts: linux/fuse.h.
"""

import socket
import struct
from typing import Final, NamedTuple

import trio

from kvfs.core.errors import ServeFailed
from mount.fuse.wire import (
    FLUSH_IN,
    GETXATTR_IN,
    OPEN_IN,
    READ_IN,
    RELEASE_IN,
    SETATTR_IN_BYTES,
    TRANSFER_MAX_BYTES,
    WRITE_IN,
    Opcode,
)

#: More than any burst of replies takes.
_WANTED_BYTES: Final = 4 << 20
#: The least buffer, as getsockopt(2) tells it: twice what was asked for (socket(7)). It holds a 64
#: KiB message and one small reply of each of pyfuse3's 256 tasks (1,280 bytes in an sk_buff). The
#: default of net.core.wmem_max gives 416 KiB.
ROOM_MIN_BYTES: Final = 384 << 10
#: socket(7), asm-generic/socket.h: beyond wmem_max, with CAP_NET_ADMIN.
_SO_SNDBUFFORCE: Final = 32

#: u32 size in struct fuse_read_in and fuse_write_in, behind fh and offset.
_SIZE: Final = struct.Struct("<16xI")
#: u32 size and flags, struct fuse_setxattr_in before FUSE_SETXATTR_EXT.
_VALUE: Final = struct.Struct("<II")
#: XATTR_CREATE and XATTR_REPLACE of setxattr(2): on any other flag pyfuse3 ends the mount.
_XATTR_FLAGS: Final = 3


def libfuse_pair(wanted_bytes: int = _WANTED_BYTES) -> tuple[socket.socket, socket.socket]:
    """Return our end and libfuse's, both non-blocking.

    Without CAP_NET_ADMIN they have as much of *wanted_bytes* as net.core.wmem_max allows. Raises
    ServeFailed if that is too little: a message that did not fit would fail a caller's request.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
        # The sender's buffer alone bounds what is under way (unix_dgram_sendmsg, net/unix).
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, wanted_bytes)
        except PermissionError:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted_bytes)
    room_bytes = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if room_bytes < ROOM_MIN_BYTES:
        ours.close()
        theirs.close()
        raise ServeFailed(
            f"a socket's buffer has {room_bytes} bytes, and {ROOM_MIN_BYTES} are needed; "
            f"`sysctl net.core.wmem_max=212992` raises it, or CAP_NET_ADMIN"
        )
    return ours, theirs


class PumpLock:
    """The lock under which pyfuse3's tasks take turns to read requests, in place of trio.Lock.

    trio's lock makes every acquire a trip through the scheduler and hands itself to the next
    task at once. Here the task that has just answered a request reads the next one; another
    takes over only when a handler says that it is about to wait (``hand_over``).
    """

    def __init__(self) -> None:
        self._held = False
        self._ending = False
        self._parked = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._parked.park()
        self._held = True

    async def __aexit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._held = False
        if failure is not None or self._ending:
            # The mount is gone: every other task must find out, too, or main() never ends.
            self._parked.unpark_all()

    def hand_over(self) -> None:
        """Let another task read while the caller waits."""
        self._parked.unpark()

    def end(self) -> None:
        """Let every task take the lock once more and notice the end.

        pyfuse3's tasks check for the end after each request only: the one that holds the lock now
        may leave after a last request and wake no other.
        """
        self._ending = True
        self._parked.unpark_all()


class RequestShape(NamedTuple):
    """How long a request must be: its fixed part, and how many names, each with a zero, follow."""

    fixed_bytes: int
    names: int = 0


REQUEST_SHAPES: Final[dict[int, RequestShape]] = {
    Opcode.LOOKUP: RequestShape(0, 1),
    Opcode.GETATTR: RequestShape(16),
    Opcode.SETATTR: RequestShape(SETATTR_IN_BYTES),
    Opcode.READLINK: RequestShape(0),
    Opcode.SYMLINK: RequestShape(0, 2),
    Opcode.MKNOD: RequestShape(16, 1),
    Opcode.MKDIR: RequestShape(8, 1),
    Opcode.UNLINK: RequestShape(0, 1),
    Opcode.RMDIR: RequestShape(0, 1),
    Opcode.RENAME: RequestShape(8, 2),
    Opcode.LINK: RequestShape(8, 1),
    Opcode.OPEN: RequestShape(OPEN_IN.size),
    Opcode.READ: RequestShape(READ_IN.size),
    Opcode.WRITE: RequestShape(WRITE_IN.size),
    Opcode.STATFS: RequestShape(0),
    Opcode.RELEASE: RequestShape(RELEASE_IN.size),
    Opcode.FSYNC: RequestShape(16),
    Opcode.SETXATTR: RequestShape(8, 1),
    Opcode.GETXATTR: RequestShape(GETXATTR_IN.size, 1),
    Opcode.LISTXATTR: RequestShape(GETXATTR_IN.size),
    Opcode.REMOVEXATTR: RequestShape(0, 1),
    Opcode.FLUSH: RequestShape(FLUSH_IN.size),
    # Before Linux 5.17 it ended after flags.
    Opcode.INIT: RequestShape(16),
    Opcode.OPENDIR: RequestShape(OPEN_IN.size),
    Opcode.READDIR: RequestShape(READ_IN.size),
    Opcode.RELEASEDIR: RequestShape(RELEASE_IN.size),
    Opcode.FSYNCDIR: RequestShape(16),
    Opcode.ACCESS: RequestShape(8),
    Opcode.CREATE: RequestShape(16, 1),
    Opcode.DESTROY: RequestShape(0),
    Opcode.READDIRPLUS: RequestShape(READ_IN.size),
    Opcode.RENAME2: RequestShape(16, 2),
}


def well_formed(opcode: int, body: memoryview) -> bool:
    """Tell whether *body*, what follows the header, holds all that *opcode* promises."""
    shape = REQUEST_SHAPES.get(opcode)
    if shape is None or len(body) < shape.fixed_bytes:
        return False
    if opcode == Opcode.WRITE:
        return bool(len(body) == shape.fixed_bytes + _SIZE.unpack_from(body)[0])
    if opcode in (Opcode.READ, Opcode.READDIR, Opcode.READDIRPLUS):
        return bool(_SIZE.unpack_from(body)[0] <= TRANSFER_MAX_BYTES)
    if not shape.names:
        return True
    return _names_end(bytes(body[shape.fixed_bytes :]), opcode, shape, body)


def _names_end(rest: bytes, opcode: int, shape: RequestShape, body: memoryview) -> bool:
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
