"""What a server that takes over a mount reads first: the mount's INIT, and resent requests.

The kernel sent INIT once. It is replayed to libfuse, and libfuse's answer stays here. Then
FUSE_NOTIFY_RESEND (Linux 6.9) has the kernel send again what the last server had read and not
answered. These requests come in any order, so all are read before the first is handed on. They have
bit 63 of their number set, and the answers must have it, too. Requests that were carried out
already are answered here.
"""

import errno
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvfs.storage.journal import RESENT
from mount.fuse import kernel
from mount.fuse.wire import IN_HEADER, IN_HEADER_BYTES, UNANSWERED

if TYPE_CHECKING:
    from mount.fuse.request_reader import RequestReader

_READ_ANEW: Final = frozenset({errno.ENOENT, errno.EINTR})


class ResentRequests:
    """Stands in for the request reader until all resent requests are handed on."""

    #: As the reader's; never 0, so that the reading goes on to the last of them.
    left = 1

    def __init__(
        self,
        device_fd: int,
        buffer: bytearray,
        init_request: bytes,
        answer: Callable[[bytes], bytes | None],
        reply: Callable[[bytes], None],
        go_on: "Callable[[], RequestReader]",
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
