"""The request reader: reads requests, and answers opens and closes of known readers itself.

A load is an open and a close, with milliseconds in between in which the client's bytes drive the
server's code out of the CPU's caches. So what a load runs through is one short loop, waiting
included (docs/dev/measuring.md).
"""

import errno
import os
import select
import struct
from collections.abc import Callable, Container
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final, Protocol

from mount.fuse.busy_poll import BusyPoll
from mount.fuse.wire import (
    GETXATTR_IN,
    IN_HEADER_BYTES,
    OPCODES,
    OPEN_OUT,
    OUT_HEADER,
    OUT_HEADER_BYTES,
    Opcode,
    error_reply,
)

if TYPE_CHECKING:
    from kvfs.core.types import InodeNo

#: After so many requests or jobs without a pause the other tasks get a turn,
TURN_MESSAGES: Final = 32
#: and after such a time, waiting included: as often as the tick wants to look at open drafts, which
#: may take any amount meanwhile (UNWATCHED_BYTES in kvfs/core/headroom.py).
TURN_NS: Final = 20_000_000
#: Requests of one client follow each other within this; trio's own way of waiting costs 30 us a
#: request more than poll(2). While we wait here other tasks wait too, so it must be short.
_POLL_MS: Final = 15

#: Of struct fuse_in_header opcode, unique, nodeid and pid; and the first eight bytes that follow:
#: fh of struct fuse_release_in, flags and open_flags of struct fuse_open_in.
_ASKED: Final = struct.Struct("<4xIQQ8xI4xQ")
_ASKED_BYTES: Final = 48
assert _ASKED.size == _ASKED_BYTES == IN_HEADER_BYTES + 8
_FLAGS_MASK: Final = (1 << 32) - 1
_OPENED_BYTES: Final = OUT_HEADER_BYTES + OPEN_OUT.size
#: Names that no file here has (requests/raw.py). The kernel asks for security.capability before a
#: write, and once more after each answer that told it of attributes.
_NEVER_SET: Final = b"security."
_NAME_OFFSET: Final = IN_HEADER_BYTES + GETXATTR_IN.size
_OPEN: Final = int(Opcode.OPEN)
_GETXATTR: Final = int(Opcode.GETXATTR)
_RELEASE: Final = int(Opcode.RELEASE)


class _Told(Protocol):
    """An open that others share."""

    @property
    def told(self) -> bytes:
        """The body of the answer to its OPEN."""


class KnownReaders(Protocol):
    """Whose opens and closes are answered here: readers of blocks that others have open."""

    @property
    def others(self) -> Container[int]:
        """Threads that belong to no file server, and 0."""

    @property
    def servers(self) -> Container[int]:
        """Threads that belong to one; the opens of all other threads are not answered here."""

    def enter(self, ino: "InodeNo", flags: int, request: int, /) -> _Told | None:
        """One more opens *ino*, by *request*; None if that is not known to be right."""

    def enter_served(self, ino: "InodeNo", flags: int, request: int, /) -> _Told | None:
        """Do the same for a file server."""

    def leave(self, ino: "InodeNo", fh: int, request: int, /) -> bool:
        """One of handle *fh* of *ino* closes, by *request*; False if that is not known."""


class RequestReader:
    """Reads the requests of one mount into one buffer. All methods run on the trio thread."""

    def __init__(
        self,
        device_fd: int,
        buffer: bytearray,
        busy_poll_us: int,
        counted: tuple[list[int], list[int]],
        reply: Callable[[bytes], None],
        readers: KnownReaders | None,
        idle: Callable[[], bool],
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """*counted*: requests by opcode, and those that were answered; *reply* sends an answer.

        The opens and closes of *readers* are answered here, of None nobody's. *idle* does one
        short piece of work when no request waits; False when there is none.
        """
        poller = select.poll()
        poller.register(device_fd, select.POLLIN)
        self._poll: Final = poller.poll
        self._device_fd: Final = device_fd
        self._buffer: Final = buffer
        self._buffers: Final = [buffer]
        self._wait: Final = BusyPoll(poller.poll, busy_poll_us, OPCODES).wait
        self._requests, self._answered = counted
        self._reply: Final = reply
        #: The kind of the request read last.
        self._last_code = 0
        self._clock_ns: Final = clock_ns
        #: How many more may be read before the other tasks get their turn.
        self.left = 0
        self._turn_ends_ns = 0
        self._readers = readers
        self._others: Container[int] = () if readers is None else readers.others
        self._servers: Container[int] = () if readers is None else readers.servers
        self._idle: Callable[[], bool] | None = idle

    def answer_nothing(self) -> None:
        """Answer nobody any more, and leave no work for idle moments."""
        self._readers = self._idle = None

    def begin_turn(self) -> None:
        """Have a turn, after the other tasks had theirs."""
        self.left = TURN_MESSAGES
        self._turn_ends_ns = self._clock_ns() + TURN_NS

    def next(self, *, may_wait: bool) -> int:
        """Read the next request that is not answered here, and return its size in bytes.

        0 if there is none, or if ``left`` ran out. Raises OSError, as read(2) on the device.
        """
        poll, buffer, readers, idle = self._poll, self._buffer, self._readers, self._idle
        others, servers = self._others, self._servers
        nodeid: InodeNo
        while self.left > 0:
            self.left -= 1
            # poll(2) first: to find nothing by readv(2) would be an exception for every request.
            if not poll(0):
                if idle is not None and idle():
                    continue
                if not (may_wait and self._wait(self._last_code, _POLL_MS)):
                    return 0
                if self._clock_ns() >= self._turn_ends_ns:
                    self.left = 0  # with the one that came
            size_bytes = os.readv(self._device_fd, self._buffers)
            code, unique, nodeid, tid, argument = _ASKED.unpack_from(buffer)
            self._last_code = code if code < OPCODES else 0
            if readers is None or size_bytes < _ASKED_BYTES:
                return size_bytes
            answer = None
            try:
                if code == _OPEN:
                    shared = None
                    if tid in others:
                        shared = readers.enter(nodeid, argument & _FLAGS_MASK, unique)
                    elif tid in servers:
                        shared = readers.enter_served(nodeid, argument & _FLAGS_MASK, unique)
                    if shared is not None:
                        answer = OUT_HEADER.pack(_OPENED_BYTES, 0, unique) + shared.told
                elif code == _RELEASE:
                    if readers.leave(nodeid, argument, unique):
                        answer = error_reply(unique, 0)
                elif code == _GETXATTR and buffer.startswith(_NEVER_SET, _NAME_OFFSET):
                    answer = error_reply(unique, errno.ENODATA)
            except Exception:
                # It fails again where the channel answers errors; the mount must go on.
                return size_bytes
            if answer is None:
                return size_bytes
            self._requests[code] += 1
            self._answered[code] += 1
            self._reply(answer)
        return 0
