"""The channel between /dev/fuse and libfuse: every message passes here, in both directions.

pyfuse3 sits behind a SEQPACKET pair and never sees the device. It looks up ``trio`` in its own
module, where ``_Trio`` below takes its place: pyfuse3's wait for a message becomes the pump, which
flushes libfuse's replies to the kernel, reads the next request and hands it over, with no task
switch in between. What the channel can answer itself (``mount.requests.fast``,
``mount.requests.raw``) never reaches libfuse.
"""

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import pyfuse3
import trio

from kvfs.core.types import PAGE_BYTES, InodeNo
from mount.fuse.errno_map import counted_errno
from mount.fuse.init_reply import Features, patch_init_reply
from mount.fuse.libfuse_pair import PumpLock, libfuse_pair, well_formed
from mount.fuse.request_reader import KnownReaders, RequestReader, ResentRequests
from mount.fuse.request_times import TIMED_OF, RequestTimes
from mount.fuse.wire import (
    ENTRY_OUT_BYTES,
    IN_HEADER,
    IN_HEADER_BYTES,
    INIT_IN,
    OPCODES,
    OPEN_OUT,
    OUT_HEADER,
    OUT_HEADER_BYTES,
    READ_IN,
    TRANSFER_MAX_BYTES,
    UNANSWERED,
    Grant,
    Opcode,
    error_reply,
)

_log: Final = logging.getLogger(__name__)

#: Read buffer: the data of a WRITE, the request's own fields and a page, as the kernel demands.
REQUEST_MAX_BYTES: Final = TRANSFER_MAX_BYTES + 2 * PAGE_BYTES
#: Copying this many bytes takes as long as handling one message, and counts as one in a turn.
_MESSAGE_BYTES: Final = 128 << 10
#: The most that libfuse answers to one READDIR. A reply beyond some 80 KiB wants its memory in one
#: piece (sock_alloc_send_pskb in net/core/sock.c); libfuse drops the one that the socket refuses.
_LISTING_MAX_BYTES: Final = 64 << 10
_LISTINGS: Final = frozenset({Opcode.READDIR, Opcode.READDIRPLUS})
#: The most late answers under way at once; a WRITE among them holds a megabyte. Requests that wait
#: for space have a bound of their own (space_wait.py): the close that frees space may be the next
#: request to read.
_LATE_MAX: Final = 256
#: The request was aborted before it was read.
_READ_ANEW: Final = frozenset({errno.EAGAIN, errno.ENOENT, errno.EINTR})
#: The request was aborted meanwhile (ENOENT), or is answered already (EINVAL): nobody waits.
_REPLY_UNWANTED: Final = frozenset({errno.ENOENT, errno.EINVAL})


Message = bytes | memoryview
#: Answers one request (unique, nodeid, what follows the header) in place of libfuse. Returns the
#: whole reply, b"" if ``Channel.reply_late`` will write it, or None to leave it to libfuse.
Answer = Callable[[int, InodeNo, memoryview], Message | None]


class Requester(NamedTuple):
    """The caller of a request; ``tid`` is its thread, 0 for another pid namespace."""

    uid: int
    gid: int
    tid: int
    #: The kernel's number for the request; 0 if it did not come from the kernel.
    unique: int = 0


class Agreement(Protocol):
    """Decides what is agreed with the kernel at INIT."""

    def features(self, offered: int, request: bytes) -> Features:
        """Choose from the flags that the kernel *offered* in its INIT *request*."""

    def begin(self, features: Features) -> None:
        """Called once the kernel has the INIT reply, before any other request is read."""


class Channel:
    """The pump of one mount. All methods run on the trio thread."""

    def __init__(
        self,
        device_fd: int,
        max_background: int,
        busy_poll_us: int,
        agreement: Agreement,
        readers: KnownReaders | None,
        idle: Callable[[], bool],
    ) -> None:
        """*readers* and *idle* as in RequestReader.

        Raises ServeFailed where a socket has too little room.
        """
        self.device_fd = device_fd
        self._agreement = agreement
        self._max_background = max_background
        self._ours, self._theirs = libfuse_pair()
        self._buffer = bytearray(REQUEST_MAX_BYTES)
        self._view = memoryview(self._buffer)
        self._replies = bytearray(REQUEST_MAX_BYTES)
        self._replies_view = memoryview(self._replies)
        self._unanswered = 0
        #: Late answers that tasks of ours still owe; those tasks need trio to run them.
        self._late = 0
        #: How many of them wait for space, which only further requests may free.
        self._aside = 0
        self._late_ended = trio.lowlevel.ParkingLot()
        self._stopped = False
        self._waiting = trio.CancelScope()
        self._grants: dict[int, Grant] = {}
        self._init_unique = -1
        self._init_flags = 0
        self._init_request = b""
        #: Whether another server answered the kernel's INIT; ours is then only replayed to libfuse.
        self._replays = False
        #: The request whose handler is running; handlers start before the next message is read.
        self.present_unique = 0
        self.present = Requester(0, 0, 0)
        self.requests = [0] * OPCODES
        self.answered_here = [0] * OPCODES
        self.times = RequestTimes()
        self._timed = self.times.running
        counted = (self.requests, self.answered_here)
        self.reader: RequestReader | ResentRequests = RequestReader(
            device_fd, self._buffer, busy_poll_us, counted, self.reply, readers, idle
        )
        self._answers: list[Answer | None] = [None] * OPCODES
        self.lock = PumpLock()

    # ---- libfuse's side ----

    @property
    def libfuse_mountpoint(self) -> str:
        """The "mountpoint" that makes libfuse talk to the pair (mount.fuse3(8), /dev/fd/N)."""
        return f"/dev/fd/{self._theirs.fileno()}"

    def install(self) -> None:
        """Put the facade in front of the trio that pyfuse3 uses."""
        # The stubs of the extension module lack this attribute; its namespace has it.
        setattr(pyfuse3, "trio", _Trio(self))  # noqa: B010

    def close(self) -> None:
        """Close our end; libfuse has closed the other with its session."""
        self._ours.close()
        self._theirs.detach()

    # ---- requests ----

    async def next_request(self) -> None:
        """Hand libfuse the next request it must answer; raises ClosedResourceError at unmount."""
        while True:
            if self._unanswered:
                self.flush()
            if self._stopped:
                raise trio.ClosedResourceError
            if self._late - self._aside >= _LATE_MAX:
                await self._wait(self._late_ended.park)
                continue
            if self.reader.left <= 0:
                await trio.lowlevel.checkpoint()
                self.reader.begin_turn()
            try:
                size_bytes = self.reader.next(may_wait=not self._unanswered and not self._late)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    raise trio.ClosedResourceError from None
                if error.errno in _READ_ANEW:
                    continue
                raise
            if not size_bytes:
                if self.reader.left > 0:
                    await self._wait(self._readable)
                    self.reader.begin_turn()
                continue
            if self._answer_or_hand_on(size_bytes):
                return

    async def _wait(self, until: Callable[[], Awaitable[None]]) -> None:
        with trio.CancelScope() as self._waiting:
            if not self._stopped:  # stop() may have run during the others' turn
                await until()

    async def _readable(self) -> None:
        await trio.lowlevel.wait_readable(self.device_fd)

    def take_over(self, init_request: bytes, answer: Callable[[bytes], bytes | None]) -> None:
        """Go on where another server ended; the kernel had sent *init_request* to that one.

        *answer* returns the answer to a request that was done but perhaps not answered, or None.
        """
        self._replays = True

        own = self.reader
        assert isinstance(own, RequestReader), "it takes over once"

        def go_on(usual: RequestReader = own) -> RequestReader:
            self.reader = usual
            usual.begin_turn()
            return usual

        self.reader = ResentRequests(
            self.device_fd, self._buffer, init_request, answer, self.reply, go_on
        )

    def stop(self) -> None:
        """Make ``next_request`` end; replies still under way are flushed by ``close``."""
        self._stopped = True
        self._waiting.cancel()
        self.lock.end()

    def _answer_or_hand_on(self, size_bytes: int) -> bool:
        """Answer the request in the buffer or hand it to libfuse; True if libfuse has it now."""
        if size_bytes < IN_HEADER_BYTES:
            _log.error("a message of %d bytes, which is less than its header", size_bytes)
            return False
        _, opcode, unique, nodeid, uid, gid, pid, _, _ = IN_HEADER.unpack_from(self._buffer)
        code = opcode if opcode < OPCODES else 0
        self.requests[code] = count = self.requests[code] + 1
        if opcode in UNANSWERED:
            return False
        if not count % TIMED_OF:
            self.times.begin(unique, code)
        request = self._view[IN_HEADER_BYTES:size_bytes]
        self.present_unique = unique
        self.present = Requester(uid, gid, pid, unique)
        answer = self._answers[code]
        if answer is not None:
            try:
                reply = answer(unique, nodeid, request)
            except Exception as error:
                # A request too short for its kind, say. Only that call fails; the mount must go on.
                reply = error_reply(unique, counted_errno(error))
            if reply is not None:
                self.answered_here[code] += 1
                if reply:
                    self.reader.left -= (size_bytes + len(reply)) // _MESSAGE_BYTES
                    self.reply(reply)
                    if self._timed:
                        self.times.end(unique)
                else:
                    self._late += 1
                return False
        if opcode == Opcode.INIT:
            self._init_unique = unique
            # Before Linux 5.17 struct fuse_init_in ended before flags2.
            whole = bytes(request[: INIT_IN.size]).ljust(INIT_IN.size, b"\0")
            _, _, _, flags, flags2 = INIT_IN.unpack(whole)
            self._init_flags = flags | flags2 << 32
            self._init_request = bytes(self._view[:size_bytes])
        if not well_formed(opcode, request):
            _log.error("request %d of %d bytes is malformed", opcode, size_bytes)
            self.reply(error_reply(unique, errno.EIO))
            return False
        if opcode in _LISTINGS:
            fh, cookie, wanted_bytes, *rest = READ_IN.unpack_from(request)
            READ_IN.pack_into(request, 0, fh, cookie, min(wanted_bytes, _LISTING_MAX_BYTES), *rest)
        try:
            self._ours.send(self._view[:size_bytes])
        except OSError as error:
            _log.error("request %d not handled: %s", opcode, error)
            self.reply(error_reply(unique, errno.EIO))
            return False
        self._unanswered += 1
        return True

    def serve(self, answers: Mapping[int, Answer]) -> None:
        """Offer requests to *answers*, by opcode, before libfuse; code 0 is for unknown opcodes.

        An opcode that has an answer already keeps it as its second choice.
        """
        for code, answer in answers.items():
            second = self._answers[code]
            self._answers[code] = answer if second is None else _either(answer, second)

    def serve_only(self, answers: Mapping[int, Answer]) -> None:
        """Answer these opcodes by *answers* alone, and no request in the request reader."""
        self.reader.answer_nothing()
        for code, answer in answers.items():
            self._answers[code] = answer

    def about_to_wait(self) -> Callable[[], None]:
        """Let another task read while the present request's handler waits.

        Call the returned function when the wait is over, with no checkpoint between it and the
        answer: it makes that request the present one again, and makes room for its answer.
        """
        unique, requester = self.present_unique, self.present
        self.lock.hand_over()

        def resume() -> None:
            self.flush()
            self.present_unique, self.present = unique, requester

        return resume

    # ---- replies ----

    def granted(self, grant: Grant) -> None:
        """Have the reply to the present request carry *grant*."""
        if grant.backing_id:
            self._grants[self.present_unique] = grant

    def flush(self) -> None:
        """Pass every reply that libfuse has written on to the kernel."""
        while self._unanswered:
            try:
                # Into one buffer: a fresh megabyte for each answer costs 30 us of page faults.
                size_bytes = self._ours.recv_into(self._replies)
            except BlockingIOError:
                return
            if not size_bytes:
                return
            reply = self._replies_view[:size_bytes]
            self._unanswered -= 1
            _, _, unique = OUT_HEADER.unpack_from(reply)
            if self._grants and unique in self._grants:
                reply = self._with_grant(reply, self._grants.pop(unique))
            elif unique == self._init_unique:
                self._init_unique = -1
                features = self._agreement.features(self._init_flags, self._init_request)
                if not self._replays:
                    self.reply(patch_init_reply(bytes(reply), features, self._max_background))
                self._agreement.begin(features)
                continue
            self.reply(reply)
            if self._timed:
                self.times.end(unique)

    def stand_aside(self) -> Callable[[], None]:
        """Let a late answer wait for what other requests may bring; those are read meanwhile.

        Call the returned function when the wait is over.
        """
        self._aside += 1
        self._late_ended.unpark()

        def go_on() -> None:
            self._aside -= 1

        return go_on

    def reply_late(self, header: bytes, body: bytes) -> None:
        """Write the reply of a request whose answer was b""."""
        self._late -= 1
        self._late_ended.unpark()
        if self._timed:
            self.times.end(OUT_HEADER.unpack_from(header)[2])
        try:
            os.writev(self.device_fd, (header, body))
        except OSError as error:
            self._refused(error)

    def reply(self, reply: Message) -> None:
        """Write one whole reply to the kernel."""
        try:
            os.write(self.device_fd, reply)
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        if error.errno != errno.ENODEV and error.errno not in _REPLY_UNWANTED:
            _log.error("reply refused: %s", error)

    def _with_grant(self, reply: memoryview, grant: Grant) -> memoryview:
        offset = len(reply) - OPEN_OUT.size
        if offset not in (OUT_HEADER_BYTES, OUT_HEADER_BYTES + ENTRY_OUT_BYTES):
            return reply  # an error: nothing was opened
        fh = OPEN_OUT.unpack_from(reply, offset)[0]
        OPEN_OUT.pack_into(reply, offset, fh, grant.open_flags, grant.backing_id)
        return reply

    async def flush_late(self) -> None:
        """Flush replies of handlers that finish late, whenever there are some, until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._ours)
            self.flush()


def _either(first: Answer, second: Answer) -> Answer:
    def answer(unique: int, nodeid: InodeNo, request: memoryview) -> Message | None:
        reply = first(unique, nodeid, request)
        return second(unique, nodeid, request) if reply is None else reply

    return answer


class _Lowlevel:
    """trio.lowlevel as pyfuse3 sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def wait_readable(self, _fd: int) -> None:
        """Wait until libfuse has a request to read."""
        await self._channel.next_request()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(trio.lowlevel, name)


class _Trio:
    """trio as pyfuse3 sees it."""

    def __init__(self, channel: Channel) -> None:
        self.lowlevel = _Lowlevel(channel)
        self._lock = channel.lock

    def Lock(self) -> PumpLock:
        """Return the pump's lock; pyfuse3 makes no other one."""
        return self._lock

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(trio, name)
