"""What is here only because libfuse and pyfuse3 sit between /dev/fuse and our handlers.

pyfuse3 sits behind a SEQPACKET pair and never sees the device. It looks up ``trio`` in its own
module, where ``_Trio`` below takes its place: its wait for a message becomes the channel's pump.
READ and WRITE never pass here (mount/requests/data.py), so the largest message carries an extended
attribute or a listing: 64 KiB.

libfuse trusts the kernel's lengths and reads past a message that is too short; the next release of
the kernel, or a bug in it, must cost a caller an error and not the mount. So each request is
checked first. Layouts: linux/fuse.h.
"""

import errno
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import pyfuse3
import trio

from kvfs.core.errors import ServeFailed
from mount.fuse.init_reply import InitExchange
from mount.fuse.wire import (
    ENTRY_OUT_BYTES,
    FLUSH_IN,
    GETXATTR_IN,
    IN_HEADER_BYTES,
    OPEN_IN,
    OPEN_OUT,
    OUT_HEADER,
    OUT_HEADER_BYTES,
    READ_IN,
    RELEASE_IN,
    REQUEST_MAX_BYTES,
    SETATTR_IN_BYTES,
    TRANSFER_MAX_BYTES,
    WRITE_IN,
    Grant,
    Message,
    Opcode,
    error_reply,
)

_log: Final = logging.getLogger(__name__)

#: More than any burst of replies takes.
_WANTED_BYTES: Final = 4 << 20
#: The least buffer, as getsockopt(2) tells it: twice what was asked for (socket(7)). It holds a 64
#: KiB message and one small reply of each of pyfuse3's 256 tasks (1,280 bytes in an sk_buff). The
#: default of net.core.wmem_max gives 416 KiB.
ROOM_MIN_BYTES: Final = 384 << 10
#: socket(7), asm-generic/socket.h: beyond wmem_max, with CAP_NET_ADMIN.
_SO_SNDBUFFORCE: Final = 32
#: The most that libfuse answers to one READDIR. A reply beyond some 80 KiB wants its memory in one
#: piece (sock_alloc_send_pskb in net/core/sock.c); libfuse drops the one that the socket refuses.
_LISTING_MAX_BYTES: Final = 64 << 10
_LISTINGS: Final = frozenset({Opcode.READDIR, Opcode.READDIRPLUS})

#: u32 size in struct fuse_read_in and fuse_write_in, behind fh and offset.
_SIZE: Final = struct.Struct("<16xI")
#: u32 size and flags, struct fuse_setxattr_in before FUSE_SETXATTR_EXT.
_VALUE: Final = struct.Struct("<II")
#: The name in a TMPFILE (slash_name in fs/namei.c), which is handed over as a CREATE; no file's.
NAME_OF_TMPFILE: Final = b"/"
#: The opcode's place in struct fuse_in_header.
_OPCODE: Final = struct.Struct("<I")
_OPCODE_AT: Final = 4
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


class Grants:
    """What replies to OPEN and CREATE must carry that libfuse cannot say: FUSE passthrough."""

    def __init__(self) -> None:
        self._by_request: dict[int, Grant] = {}

    def add(self, unique: int, grant: Grant) -> None:
        """Have the reply to request *unique* carry *grant*."""
        if grant.backing_id:
            self._by_request[unique] = grant

    def put_into(self, unique: int, reply: memoryview) -> None:
        """Write the grant of request *unique* into libfuse's *reply*, if it has one."""
        grant = self._by_request.pop(unique, None)
        offset = len(reply) - OPEN_OUT.size
        # Otherwise it is an error: nothing was opened.
        if grant and offset in (OUT_HEADER_BYTES, OUT_HEADER_BYTES + ENTRY_OUT_BYTES):
            fh = OPEN_OUT.unpack_from(reply, offset)[0]
            OPEN_OUT.pack_into(reply, offset, fh, grant.open_flags, grant.backing_id)


class Pump(Protocol):
    """Brings the requests."""

    async def next_request(self) -> None:
        """Hand libfuse the next request it must answer; raises ClosedResourceError at unmount."""


class Libfuse:
    """libfuse as the channel sees it: requests that are handed to it, and its replies."""

    def __init__(self, init: InitExchange, write: Callable[[int, Message], None]) -> None:
        """*write* writes the reply to a request, which it is told by its number, to the kernel.

        Raises ServeFailed where a socket has too little room.
        """
        self._init: Final = init
        self._write: Final = write
        self._ours, self._theirs = libfuse_pair()
        self._replies = bytearray(REQUEST_MAX_BYTES)
        self._view = memoryview(self._replies)
        #: Requests that it was handed and has not answered.
        self.unanswered = 0
        self.grants: Final = Grants()
        self.lock: Final = PumpLock()

    @property
    def mountpoint(self) -> str:
        """The "mountpoint" that makes libfuse talk to the pair (mount.fuse3(8), /dev/fd/N)."""
        return f"/dev/fd/{self._theirs.fileno()}"

    def install(self, pump: Pump) -> None:
        """Put the facade in front of the trio that pyfuse3 uses; *pump* brings it requests."""
        # The stubs of the extension module lack this attribute; its namespace has it.
        setattr(pyfuse3, "trio", _Trio(pump, self.lock))  # noqa: B010

    def close(self) -> None:
        """Close our end; libfuse has closed the other with its session."""
        self._ours.close()
        self._theirs.detach()

    def hand(self, opcode: int, unique: int, message: memoryview) -> bool:
        """Hand the whole request *message* over; False if it was answered with an error instead."""
        body = message[IN_HEADER_BYTES:]
        if opcode == Opcode.TMPFILE:  # libfuse has none; both have one shape
            opcode = Opcode.CREATE
            _OPCODE.pack_into(message, _OPCODE_AT, opcode)
        if not well_formed(opcode, body):
            _log.error("request %d of %d bytes is malformed", opcode, len(message))
            self._write(unique, error_reply(unique, errno.EIO))
            return False
        if opcode == Opcode.INIT:
            self._init.asked(unique, message)
        elif opcode in _LISTINGS:
            fh, cookie, wanted_bytes, *rest = READ_IN.unpack_from(body)
            READ_IN.pack_into(body, 0, fh, cookie, min(wanted_bytes, _LISTING_MAX_BYTES), *rest)
        try:
            self._ours.send(message)
        except OSError as error:
            _log.error("request %d not handled: %s", opcode, error)
            self._write(unique, error_reply(unique, errno.EIO))
            return False
        self.unanswered += 1
        return True

    def flush(self) -> None:
        """Pass every reply that libfuse has written on to the kernel."""
        while self.unanswered:
            try:
                # Into one buffer: a fresh megabyte for each answer costs 30 us of page faults.
                size_bytes = self._ours.recv_into(self._replies)
            except BlockingIOError:
                return
            if not size_bytes:
                return
            reply = self._view[:size_bytes]
            self.unanswered -= 1
            _, _, unique = OUT_HEADER.unpack_from(reply)
            if unique == self._init.unique:
                self._init.answered(reply, self._write)
                continue
            self.grants.put_into(unique, reply)
            self._write(unique, reply)

    async def flush_late(self) -> None:
        """Flush replies of handlers that finish late, whenever there are some, until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._ours)
            self.flush()


class _Lowlevel:
    """trio.lowlevel as pyfuse3 sees it."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump

    async def wait_readable(self, _fd: int) -> None:
        """Wait until libfuse has a request to read."""
        await self._pump.next_request()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(trio.lowlevel, name)


class _Trio:
    """trio as pyfuse3 sees it."""

    def __init__(self, pump: Pump, lock: PumpLock) -> None:
        self.lowlevel = _Lowlevel(pump)
        self._lock = lock

    def Lock(self) -> PumpLock:
        """Return the pump's lock; pyfuse3 makes no other one."""
        return self._lock

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(trio, name)


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
