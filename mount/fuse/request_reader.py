"""Reads requests from /dev/fuse, and answers opens and closes of known readers itself.

A load is an open and a close, milliseconds apart. In between, the client's data drives the server's
code out of the CPU caches. So all code that a load runs through is one short loop, waiting included
(docs/performance.md).
"""

import errno
import os
import select
import struct
from collections import deque
from collections.abc import Callable, Container
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final, Protocol

from kvfs.storage.journal import RESENT
from mount.fuse import kernel
from mount.fuse.wire import (
    GETXATTR_IN,
    IN_HEADER,
    IN_HEADER_BYTES,
    OPCODES,
    OPEN_OUT,
    OUT_HEADER,
    OUT_HEADER_BYTES,
    UNANSWERED,
    Opcode,
    error_reply,
)

if TYPE_CHECKING:
    from kvfs.core.types import InodeNo
#: The other tasks get a turn after this many requests or idle jobs without a pause,
TURN_MESSAGES: Final = 32
#: or after this time, waiting included: the tick must look this often at open drafts, which grow
#: unwatched in between (UNWATCHED_BYTES in kvfs/core/headroom.py).
TURN_NS: Final = 20_000_000
#: Requests of one client follow each other within this; trio's own way of waiting costs 30 us a
#: request more than poll(2). While we wait here other tasks wait too, so it must be short.
_POLL_MS: Final = 15

#: After this many immediate successors in a row another one is expected. Requests of two clients
#: that coincide by chance seldom make such a streak.
_SURE: Final = 2
#: A sleeping server that is woken within this many times the busy-poll time would have seen the
#: request while polling: most of that delay is the wake-up itself.
_WAKING: Final = 3
#: The kind of opens and closes of known readers. Between them a client copies bytes, and none waits
#: for a close. So what follows is awaited awake for a fifth as long as after other kinds.
LOADS: Final = OPCODES
_LOADS_DIVISOR: Final = 5
_READ_ANEW: Final = frozenset({errno.ENOENT, errno.EINTR})

#: Of struct fuse_in_header opcode, unique, nodeid, uid and pid; and the first eight bytes after it:
#: fh of struct fuse_release_in, flags and open_flags of struct fuse_open_in.
_ASKED: Final = struct.Struct("<4xIQQI4xI4xQ")
_ASKED_BYTES: Final = 48
assert _ASKED.size == _ASKED_BYTES == IN_HEADER_BYTES + 8
_FLAGS_MASK: Final = (1 << 32) - 1
_OPENED_BYTES: Final = OUT_HEADER_BYTES + OPEN_OUT.size
#: Prefix of attributes that no file here has (requests/raw.py). The kernel asks for
#: security.capability before a write, and once more after each answer that told it of attributes.
_NEVER_SET: Final = b"security."
_NAME_OFFSET: Final = IN_HEADER_BYTES + GETXATTR_IN.size
_OPEN: Final = int(Opcode.OPEN)
_GETXATTR: Final = int(Opcode.GETXATTR)
_RELEASE: Final = int(Opcode.RELEASE)
_FORGETS: Final = frozenset({int(Opcode.FORGET), int(Opcode.BATCH_FORGET)})


class BusyPoll:
    """Waits for the next request: polls for a moment if it is likely to come at once.

    Storing a block takes nine requests, most sent as soon as the one before is answered. Sleeping
    in between costs the server a turn of the scheduler and makes the client wake another CPU, while
    both contend for the queue's lock (fuse_dev_poll in linux/fs/fuse/dev.c). So the wait learns
    which kinds of request are followed by another at once, and polls after those. Like SO_BUSY_POLL
    of sockets (socket(7)), it trades a bounded amount of CPU time for latency.

    ``poll`` takes milliseconds; true means that a request is there (poll(2)).
    """

    __slots__ = ("_busy_ns", "_clock_ns", "_poll", "_streaks")

    def __init__(
        self,
        poll: Callable[[int], object],
        busy_us: int,
        kinds: int,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """*busy_us*: the longest busy poll, 0: none; *kinds*: the number of request kinds."""
        self._poll = poll
        self._clock_ns = clock_ns
        self._busy_ns = busy_us * 1000
        #: By the kind of the last request: how often in a row the next one came at once.
        self._streaks = [0] * kinds

    def wait(self, after: int, longest_ms: int) -> bool:
        """Wait *longest_ms* at most for the request after one of kind *after*; True if it came."""
        poll, clock_ns = self._poll, self._clock_ns
        streaks, busy_ns = self._streaks, self._busy_ns
        if after == LOADS:
            busy_ns //= _LOADS_DIVISOR
        began_ns = clock_ns()
        if streaks[after] >= _SURE:
            while clock_ns() - began_ns < busy_ns:
                if poll(0):
                    return True
            streaks[after] = 0
            return bool(poll(longest_ms))
        came = bool(poll(longest_ms))
        at_once = came and clock_ns() - began_ns < _WAKING * busy_ns
        streaks[after] = streaks[after] + 1 if at_once else 0
        return came


class _Told(Protocol):
    """An open handle that many opens share."""

    @property
    def told(self) -> bytes:
        """The body of the answer to its OPEN."""


class KnownReaders(Protocol):
    """Readers of blocks that are open already: their opens and closes are answered here."""

    @property
    def others(self) -> Container[int]:
        """Ids of threads that belong to no file server, and 0."""

    @property
    def servers(self) -> Container[int]:
        """Ids of threads that belong to one. Opens by all other threads are not answered here."""

    def enter(
        self, ino: "InodeNo", flags: int, request: int, uid: int, tid: int, /
    ) -> _Told | None:
        """Count an open of *ino* by *request* of *uid*'s *tid*; None if others must grant it."""

    def enter_served(
        self, ino: "InodeNo", flags: int, request: int, uid: int, tid: int, /
    ) -> _Told | None:
        """Do the same for a file server."""

    def leave(self, ino: "InodeNo", fh: int, request: int, /) -> bool:
        """Count a close of handle *fh* of *ino* by *request*; False if it is not known here."""

    def known(self) -> object:
        """Return what all this looks at and counts in, for the compiled reader."""


class Reader(Protocol):
    """Reads the requests of one mount into one buffer, and answers those of known readers."""

    #: How many more may be read before the other tasks get their turn.
    left: int

    def answer_nothing(self) -> None:
        """Answer no request here any more, and do no idle work."""

    def begin_turn(self) -> None:
        """Begin a turn, after the other tasks had theirs."""

    def next(self, *, may_wait: bool) -> int:
        """Read the next request that is not answered here, and return its size in bytes."""


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

        The opens and closes of *readers* are answered here; None: nobody's. *idle* does one short
        piece of work when no request waits, and returns False if there is none.
        """
        poller = select.poll()
        poller.register(device_fd, select.POLLIN)
        self._poll: Final = poller.poll
        self._device_fd: Final = device_fd
        self._buffer: Final = buffer
        self._buffers: Final = [buffer]
        self._wait: Final = BusyPoll(poller.poll, busy_poll_us, OPCODES + 1).wait
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
        """Answer no request here any more, and do no idle work."""
        self._readers = self._idle = None

    def begin_turn(self) -> None:
        """Begin a turn, after the other tasks had theirs."""
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
            # poll(2) first: a readv(2) that finds nothing would raise an exception each time.
            if not poll(0):
                if idle is not None and idle():
                    continue
                if not (may_wait and self._wait(self._last_code, _POLL_MS)):
                    return 0
                if self._clock_ns() >= self._turn_ends_ns:
                    self.left = 0  # this request is the turn's last
            size_bytes = os.readv(self._device_fd, self._buffers)
            code, unique, nodeid, uid, tid, argument = _ASKED.unpack_from(buffer)
            self._last_code = code if code < OPCODES else 0
            if readers is None or size_bytes < _ASKED_BYTES:
                return size_bytes
            if code in _FORGETS:  # nobody counts lookups
                self._requests[code] += 1
                continue
            answer = None
            try:
                if code == _OPEN:
                    shared = None
                    if tid in others:
                        flags = argument & _FLAGS_MASK
                        shared = readers.enter(nodeid, flags, unique, uid, tid)
                    elif tid in servers:
                        flags = argument & _FLAGS_MASK
                        shared = readers.enter_served(nodeid, flags, unique, uid, tid)
                    if shared is not None:
                        answer = OUT_HEADER.pack(_OPENED_BYTES, 0, unique) + shared.told
                        self._last_code = LOADS
                elif code == _RELEASE:
                    if readers.leave(nodeid, argument, unique):
                        answer = error_reply(unique, 0)
                        self._last_code = LOADS
                elif code == _GETXATTR and buffer.startswith(_NEVER_SET, _NAME_OFFSET):
                    answer = error_reply(unique, errno.ENODATA)
            except Exception:
                # It fails again in the channel, which answers with the error; the mount must go on.
                return size_bytes
            if answer is None:
                return size_bytes
            self._requests[code] += 1
            self._answered[code] += 1
            self._reply(answer)
        return 0


class ResentRequests:
    """What a server that takes over a mount reads first: the mount's INIT, and resent requests.

    It stands in for the request reader until all of them are handed on. The kernel sent INIT once.
    It is replayed to libfuse, and libfuse's answer stays here. Then FUSE_NOTIFY_RESEND (Linux 6.9)
    has the kernel send again what the last server had read and not answered. These requests come in
    any order, so all are read before the first is handed on. They have bit 63 of their number set,
    and the answers must have it, too. Requests that were carried out already are answered here.
    """

    #: As the reader's; never 0, so that the reading goes on to the last of them.
    left = 1

    def __init__(
        self,
        device_fd: int,
        buffer: bytearray,
        init_request: bytes,
        answer: Callable[[bytes], bytes | None],
        reply: Callable[[bytes], None],
        go_on: Callable[[], Reader],
    ) -> None:
        """*answer* returns the answer to a request that was done, or None; *go_on* the reader."""
        self._device_fd: Final = device_fd
        self._buffer: Final = buffer
        self._init: bytes | None = init_request
        self._answer: Final = answer
        self._reply: Final = reply
        self._go_on: Final = go_on
        self._resent: deque[bytes] | None = None

    def begin_turn(self) -> None:
        """Begin a turn; it takes all resent requests."""
        self.left = 1

    def answer_nothing(self) -> None:
        """Go on with the usual reader, which answers nothing from now on."""
        self._go_on().answer_nothing()

    def next(self, *, may_wait: bool) -> int:
        """Put the next request into the buffer, and return its size in bytes; as the reader's."""
        self.left = 1
        if self._init is not None:
            init, self._init = self._init, None
            return self._hand_on(init)
        if self._resent is None:
            self._resent = deque(self._read())
        while self._resent:
            message = self._resent.popleft()
            answer = self._answer(message)
            if answer is None:
                return self._hand_on(message)
            self._reply(answer)
        return self._go_on().next(may_wait=may_wait)

    def _hand_on(self, message: bytes) -> int:
        self._buffer[: len(message)] = message
        return len(message)

    def _read(self) -> list[bytes]:
        """Have the kernel resend; return all requests that come, oldest first. Raises OSError."""
        kernel.notify_resend(self._device_fd)
        found: list[bytes] = []
        while True:
            try:
                size_bytes = os.readv(self._device_fd, [self._buffer])
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _READ_ANEW:
                    continue
                raise
            found.append(bytes(memoryview(self._buffer)[:size_bytes]))
        return sorted(filter(_is_answered, found), key=_number)


def _is_answered(message: bytes) -> bool:
    return len(message) >= IN_HEADER_BYTES and IN_HEADER.unpack_from(message)[1] not in UNANSWERED


def _number(message: bytes) -> int:
    number: int = IN_HEADER.unpack_from(message)[2] & ~RESENT
    return number
