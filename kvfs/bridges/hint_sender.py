"""Sends hints to the socket of a mount, and never waits for it.

What the socket does not take at once is kept, within a bound of bytes and of time, and sent a
little later by a thread that lives so long. What goes beyond is dropped and counted: an engine that
cannot hint works as one that never did. A server that restarts is found again.
"""

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from kvfs.client.control_socket import LINE_MAX_BYTES

#: What may wait: 64 whole lines, some 30,000 names.
WAITING_MAX_BYTES: Final = 4 << 20
#: A hint that waited for so long is dropped, for its request is over.
WAITING_MAX_S: Final = 10.0
#: Between two attempts to reach a server.
RETRY_S: Final = 1.0
#: Between two attempts to send what waits.
_AGAIN_S: Final = 0.1


class SentHints:
    """What became of the names and prefixes of hints."""

    def __init__(self) -> None:
        self.sent = self.dropped = self.connections = 0


class _Line(NamedTuple):
    """A batch of hints as the socket takes it, and how many names are in it."""

    text: bytes
    names: int
    made_s: float


def start_timer(wait_s: float, call: Callable[[], None]) -> None:
    """Have *call* called after *wait_s* by a thread, unless the process ends before."""
    timer = threading.Timer(wait_s, call)
    timer.daemon = True
    timer.start()


class HintSender:
    """One client of the socket at *path*. Several threads may use it."""

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = start_timer,
    ) -> None:
        self._path, self._clock, self._later = path, clock, later
        self._is_due_again = False
        self.counts = SentHints()
        self._waiting: deque[_Line] = deque()
        self._waiting_bytes = 0
        self._socket: socket.socket | None = None
        #: What the server has of the first line.
        self._sent_bytes = 0
        self._next_attempt_s = 0.0
        # Held for system calls that do not wait.
        self._lock = threading.Lock()

    def send(self, hints: Iterable[dict[str, Any]]) -> None:
        """Send *hints*, each about ``names``, or keep them for a while; never waits."""
        with self._lock:
            now_s = self._clock()
            for text, names in _lines_of(hints):
                self._waiting.append(_Line(text, names, now_s))
                self._waiting_bytes += len(text)
            self._flush(now_s)

    def close(self) -> None:
        """Send what the socket takes at once, and hang up; the rest counts as dropped."""
        with self._lock:
            self._flush(self._clock())
            self._hang_up()
            self._drop_while(lambda _line: True)

    def _flush(self, now_s: float) -> None:
        while self._waiting and self._is_connected(now_s):
            assert self._socket is not None
            line = self._waiting[0]
            try:
                self._sent_bytes += self._socket.send(
                    memoryview(line.text)[self._sent_bytes :], socket.MSG_NOSIGNAL
                )
            except BlockingIOError:
                break
            except OSError:  # its server ended; the line is sent anew to the next one
                self._hang_up()
                continue
            if self._sent_bytes == len(line.text):
                self.counts.sent += line.names
                self._forget(0)
                self._sent_bytes = 0
        self._drop_while(
            lambda line: (
                self._waiting_bytes > WAITING_MAX_BYTES or now_s - line.made_s > WAITING_MAX_S
            )
        )
        if self._waiting and not self._is_due_again:
            try:
                self._later(_AGAIN_S, self._flush_again)
                self._is_due_again = True
            except RuntimeError:  # no thread can be started: the next call sends it
                pass

    def _flush_again(self) -> None:
        with self._lock:
            self._is_due_again = False
            self._flush(self._clock())

    def _drop_while(self, too_many: Callable[[_Line], bool]) -> None:
        # What the server has half of is followed by its other half.
        first = 1 if self._sent_bytes else 0
        while len(self._waiting) > first and too_many(self._waiting[first]):
            self.counts.dropped += self._waiting[first].names
            self._forget(first)

    def _forget(self, index: int) -> None:
        self._waiting_bytes -= len(self._waiting[index].text)
        del self._waiting[index]

    def _is_connected(self, now_s: float) -> bool:
        if self._socket is not None:
            return True
        if now_s < self._next_attempt_s:
            return False
        self._next_attempt_s = now_s + RETRY_S
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with contextlib.ExitStack() as unless_connected:
            try:
                attempt = unless_connected.enter_context(socket.socket(socket.AF_UNIX, kind))
                attempt.connect(self._path)
            except OSError:  # nobody listens, its queue is full (EAGAIN), or no descriptor is left
                return False
            unless_connected.pop_all()
        self._socket = attempt
        self.counts.connections += 1
        return True

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self._sent_bytes = None, 0


def _lines_of(hints: Iterable[dict[str, Any]]) -> Iterator[tuple[bytes, int]]:
    """Yield lines of at most LINE_MAX_BYTES, and how many names each has."""
    for hint in hints:
        names: list[str] = hint["names"]
        text = json.dumps({"hints": [hint]}).encode() + b"\n"
        if len(text) <= LINE_MAX_BYTES:
            yield text, len(names)
        elif len(names) > 1:
            half = len(names) // 2
            yield from _lines_of({**hint, "names": part} for part in (names[:half], names[half:]))
