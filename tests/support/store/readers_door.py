"""A request reader before the files of a desk: a socket stands for /dev/fuse."""

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

from kvfs.core.types import HandleNo, InodeNo
from mount.fuse.channel import ReaderChoice
from mount.fuse.wire import (
    IN_HEADER,
    IN_HEADER_BYTES,
    OPCODES,
    OPEN_IN,
    RELEASE_IN,
    Opcode,
)
from tests.support.store.readers_desk import Desk

if TYPE_CHECKING:
    from collections.abc import Callable

BUFFER_BYTES: Final = 4096


class Door:
    """An intake before the files of a desk; ``kernel`` is the test's end of the device."""

    def __init__(self, desk: Desk, choice: ReaderChoice) -> None:
        self.desk = desk
        self.kernel, self._device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.setblocking(False)
        self._device.setblocking(False)
        self._replies: list[bytes] = []
        self.now_ns = 0
        self.requests, self.answered = [0] * OPCODES, [0] * OPCODES
        self.idle: Callable[[], bool] = lambda: False
        self.reader = choice.make(
            self._device.fileno(),
            bytearray(BUFFER_BYTES),
            busy_poll_us=40,
            counted=(self.requests, self.answered),
            reply=self._device.send,
            readers=desk.files.readers,
            idle=lambda: self.idle(),
            clock_ns=self.clock_ns,
        )
        self.reader.begin_turn()

    @property
    def replies(self) -> list[bytes]:
        """Return all that the kernel got so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._replies.append(self.kernel.recv(BUFFER_BYTES))
        return self._replies

    @property
    def device_fd(self) -> int:
        """The reader's end."""
        return self._device.fileno()

    def clock_ns(self) -> int:
        """Look at the clock."""
        return self.now_ns

    def ask(self, opcode: int, unique: int, ino: InodeNo, body: bytes, tid: int = 0) -> int:
        """Send a request; return the size of one that is left to others, 0 if there is none."""
        size_bytes = IN_HEADER_BYTES + len(body)
        head = IN_HEADER.pack(size_bytes, opcode, unique, ino, 0, 0, tid, 0, 0)
        self.kernel.send(head + body)
        return self.reader.next(may_wait=False)

    def open(self, unique: int, ino: InodeNo, flags: int = os.O_RDONLY) -> int:
        """Ask for an open."""
        return self.ask(Opcode.OPEN, unique, ino, OPEN_IN.pack(flags, 0))

    def release(self, unique: int, ino: InodeNo, fh: HandleNo) -> int:
        """Ask for a close."""
        return self.ask(Opcode.RELEASE, unique, ino, RELEASE_IN.pack(fh, 0, 0, 0))

    def readers(self, ino: InodeNo) -> int:
        """Return how many readers are counted."""
        store = self.desk.store
        return store.opened(ino).readers if ino in store.open_inos else 0

    def close(self) -> None:
        """Close both ends, and let go of the files."""
        self.reader.answer_nothing()
        self.kernel.close()
        self._device.close()
