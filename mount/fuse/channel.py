"""The channel between /dev/fuse and what answers: every message passes here, in both directions.

pyfuse3's wait for a message becomes the pump (libfuse_pair.py): it flushes libfuse's replies to the
kernel, reads the next request and answers it, or hands it over, with no task switch in between.
What the channel can answer itself (``mount.requests.fast``, ``mount.requests.raw``) never reaches
libfuse.

The request reader is the compiled one or, where nothing was compiled, for lack of a compiler, the
one in Python, which defines both. They answer the same requests alike
(tests/fuse/channel/test_compiled_reader_model.py).
"""

import errno
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter_ns
from typing import Final, NamedTuple

import trio

from kvfs.core.errors import NotAtHand
from kvfs.core.latency import Latency
from kvfs.core.settings import Settings
from kvfs.core.types import InodeNo
from mount.fuse.errno_map import counted_errno
from mount.fuse.init_reply import Agreement, InitExchange
from mount.fuse.late import OwedAnswers
from mount.fuse.libfuse_pair import Libfuse
from mount.fuse.request_reader import (
    TURN_MESSAGES,
    TURN_NS,
    KnownReaders,
    Reader,
    RequestReader,
    ResentRequests,
)
from mount.fuse.wire import (
    IN_HEADER,
    IN_HEADER_BYTES,
    OPCODES,
    OUT_HEADER,
    REQUEST_MAX_BYTES,
    UNANSWERED,
    Message,
    error_reply,
)

COMPILED: Final = "compiled"
IN_PYTHON: Final = "python"


class ReaderChoice(NamedTuple):
    """How to make the reader (arguments as of RequestReader), and why that one."""

    make: Callable[..., Reader]
    name: str
    reason: str


#: The reader that the other one must equal.
PYTHON: Final = ReaderChoice(RequestReader, IN_PYTHON, "compiled_reader = false")


def look_for_compiled() -> ReaderChoice:
    """Return the compiled reader, or the one in Python where there is none."""
    try:
        from mount.fuse.compiled_reader import CompiledReader
    except ImportError as error:
        return ReaderChoice(RequestReader, IN_PYTHON, f"none was compiled: {error}")
    make = functools.partial(CompiledReader, turn_messages=TURN_MESSAGES, turn_ns=TURN_NS)
    return ReaderChoice(make, COMPILED, "it was compiled at installation")


#: As this module is imported: another version may be installed before a server is forked.
_FOUND: Final = look_for_compiled()


def choose_reader(*, compiled: bool, found: ReaderChoice = _FOUND) -> ReaderChoice:
    """Return the compiled reader if it is wanted and was *found*."""
    return found if compiled else PYTHON


_log: Final = logging.getLogger(__name__)

#: Copying this many bytes takes as long as handling one message, and counts as one in a turn.
_MESSAGE_BYTES: Final = 128 << 10
#: The most late answers under way at once; a WRITE among them holds a megabyte. Requests that wait
#: for space have a bound of their own (space_wait.py): the close that frees space may be the next
#: request to read.
_LATE_MAX: Final = 256
#: One in this many requests of a kind is timed. A prime, so that it does not fall into step with a
#: client whose every second, fourth or tenth request is different.
TIMED_OF: Final = 61
#: Timed requests without an answer yet; more are not timed.
_RUNNING_MAX: Final = 1024
#: The request was aborted before it was read.
_READ_ANEW: Final = frozenset({errno.EAGAIN, errno.ENOENT, errno.EINTR})
#: The request was aborted meanwhile (ENOENT), or is answered already (EINVAL): nobody waits.
_REPLY_UNWANTED: Final = frozenset({errno.ENOENT, errno.EINVAL})

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


class RequestTimes:
    """How long requests take in the server, from the read to the answer, by kind; a sample.

    Reading the clock twice for each would cost as much as some requests do; a sample tells the
    same. What request_reader.py answers itself is not timed: it takes some microseconds.
    """

    def __init__(self, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._clock_ns: Final = clock_ns
        #: Timed requests that wait for their answer: kind and begin, by ``unique``.
        self.running: Final[dict[int, tuple[int, int]]] = {}
        self.by_code: Final[dict[int, Latency]] = {}

    def begin(self, unique: int, code: int) -> None:
        """Time the request *unique*, which was just read."""
        if len(self.running) < _RUNNING_MAX:
            self.running[unique] = code, self._clock_ns()

    def end(self, unique: int) -> None:
        """Count the request *unique*, which was just answered, if it is timed."""
        begun = self.running.pop(unique, None)
        if begun is not None:
            code, begun_ns = begun
            if (latency := self.by_code.get(code)) is None:
                latency = self.by_code[code] = Latency()
            latency.add(self._clock_ns() - begun_ns)


class Channel:
    """The pump of one mount. All methods run on the trio thread."""

    def __init__(
        self,
        device_fd: int,
        settings: Settings,
        agreement: Agreement,
        readers: KnownReaders | None,
        idle: Callable[[], bool],
    ) -> None:
        """*readers* and *idle* as in RequestReader.

        Raises ServeFailed where a socket has too little room.
        """
        self._device_fd = device_fd
        self._init = InitExchange(agreement, settings.max_background)
        self.libfuse: Final = Libfuse(self._init, self._pass_on)
        self._buffer = bytearray(REQUEST_MAX_BYTES)
        self._view = memoryview(self._buffer)
        self.owed: Final = OwedAnswers()
        self._stopped = False
        self._waiting = trio.CancelScope()
        #: Who made the request whose handler is running; handlers start before the next message is
        #: read.
        self.present = Requester(0, 0, 0)
        self.requests = [0] * OPCODES
        self.answered_here = [0] * OPCODES
        self.times = RequestTimes()
        self._timed = self.times.running
        counted = (self.requests, self.answered_here)
        self.choice: Final = choose_reader(compiled=settings.compiled_reader)
        self.reader: Reader = self.choice.make(
            device_fd, self._buffer, settings.busy_poll_us, counted, self.reply, readers, idle
        )
        self._answers: list[Answer | None] = [None] * OPCODES

    # ---- requests ----

    async def next_request(self) -> None:
        """Hand libfuse the next request it must answer; raises ClosedResourceError at unmount."""
        libfuse, owed = self.libfuse, self.owed
        while True:
            if libfuse.unanswered:
                libfuse.flush()
            if self._stopped:
                raise trio.ClosedResourceError
            if owed.under_way >= _LATE_MAX:
                await self._wait(owed.fewer)
                continue
            if self.reader.left <= 0:
                await trio.lowlevel.checkpoint()
                self.reader.begin_turn()
            try:
                size_bytes = self.reader.next(may_wait=not libfuse.unanswered and not owed.number)
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
        await trio.lowlevel.wait_readable(self._device_fd)

    def take_over(self, init_request: bytes, answer: Callable[[bytes], bytes | None]) -> None:
        """Go on where another server ended; the kernel had sent *init_request* to that one.

        *answer* returns the answer to a request that was done but perhaps not answered, None for
        another one, b"" if it answers later (``reply_late``).
        """
        self._init.replay()
        own = self.reader
        assert not isinstance(own, ResentRequests), "it takes over once"

        def go_on(usual: Reader = own) -> Reader:
            self.reader = usual
            usual.begin_turn()
            return usual

        def reply(reply: bytes) -> None:
            if reply:
                self.reply(reply)
            else:
                self.owed.begin()

        self.reader = ResentRequests(
            self._device_fd, self._buffer, init_request, answer, reply, go_on
        )

    def stop(self) -> None:
        """Make ``next_request`` end, once it has passed on what libfuse has answered by then."""
        self._stopped = True
        self._waiting.cancel()
        self.libfuse.lock.end()

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
        self.present = Requester(uid, gid, pid, unique)
        answer = self._answers[code]
        if answer is not None:
            try:
                reply = answer(unique, nodeid, self._view[IN_HEADER_BYTES:size_bytes])
            except NotAtHand:
                reply = None  # pyfuse3 takes it, and waits for the device
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
                    self.owed.begin()
                return False
        return self.libfuse.hand(opcode, unique, self._view[:size_bytes])

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

    def asker(self) -> Requester:
        """Return who made the present request."""
        return self.present

    def about_to_wait(self) -> Callable[[], None]:
        """Let another task read while the present request's handler waits.

        Call the returned function when the wait is over, with no checkpoint between it and the
        answer: it makes that request the present one again, and makes room for its answer.
        """
        present = self.present
        self.libfuse.lock.hand_over()

        def resume() -> None:
            self.libfuse.flush()
            self.present = present

        return resume

    # ---- replies ----

    def reply(self, reply: Message) -> None:
        """Write one whole reply to the kernel."""
        try:
            os.write(self._device_fd, reply)
        except OSError as error:
            self._refused(error)

    def _pass_on(self, unique: int, reply: Message) -> None:
        """Write the reply to request *unique* that libfuse was handed."""
        self.reply(reply)
        if self._timed:
            self.times.end(unique)

    def reply_late(self, header: bytes, body: bytes) -> None:
        """Write the reply of a request whose answer was b""."""
        self.owed.end()
        if self._timed:
            self.times.end(OUT_HEADER.unpack_from(header)[2])
        try:
            os.writev(self._device_fd, (header, body))
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        if error.errno != errno.ENODEV and error.errno not in _REPLY_UNWANTED:
            _log.error("reply refused: %s", error)


def _either(first: Answer, second: Answer) -> Answer:
    def answer(unique: int, nodeid: InodeNo, request: memoryview) -> Message | None:
        reply = first(unique, nodeid, request)
        return second(unique, nodeid, request) if reply is None else reply

    return answer
