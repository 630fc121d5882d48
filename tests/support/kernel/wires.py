"""A channel whose kernel and libfuse are the test: sockets stand for /dev/fuse and for the pair."""

import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Final

import pytest
import trio

from kvfs.core.settings import Settings
from mount.fuse.channel import Channel
from mount.fuse.init_reply import agree
from mount.fuse.wire import IN_HEADER, IN_HEADER_BYTES

ROOM_BYTES: Final = 1 << 20
#: For tests that stand in for readv(2), or for a method of the reader: only Python can be patched.
in_python: Final = pytest.mark.parametrize("wires", [False], ids=["python"], indirect=True)


def request(opcode: int, unique: int, body: bytes = b"", nodeid: int = 1) -> bytes:
    """Return a whole request of process 99."""
    size_bytes = IN_HEADER_BYTES + len(body)
    return IN_HEADER.pack(size_bytes, opcode, unique, nodeid, 0, 0, 99, 0, 0) + body


class Wires:
    """A channel between two sockets; ``kernel`` and ``libfuse`` are the test's ends."""

    def __init__(self, *, compiled: bool) -> None:
        self.kernel, self._device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._device.setblocking(False)
        self.idle = lambda: False
        #: What is agreed at INIT, as far as a test does not say otherwise.
        self.agreement = SimpleNamespace(
            features=lambda offered, _: agree(offered, passthrough=False), begin=lambda _: None
        )
        self.channel = Channel(
            self._device.fileno(),
            Settings(max_background=100, busy_poll_us=40, compiled_reader=compiled),
            agreement=self.agreement,
            readers=None,
            idle=lambda: self.idle(),  # type: ignore[no-untyped-call]
        )
        self.libfuse = socket.socket(fileno=os.dup(int(self.channel.libfuse.mountpoint[8:])))
        self.kernel.setblocking(False)

    async def pump(self) -> bytes:
        """Let the channel work until libfuse has a request; return that."""
        await self.channel.next_request()
        return self.libfuse.recv(ROOM_BYTES)

    async def drain(self) -> None:
        """Let the channel work until it has nothing to do."""
        with trio.CancelScope() as scope:

            def idle() -> bool:
                scope.cancel()
                return False

            self.idle = idle
            await self.channel.next_request()
        assert scope.cancelled_caught

    def replies(self) -> list[bytes]:
        """Return what the kernel got."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.kernel.recv(ROOM_BYTES))
        return found

    def close(self) -> None:
        """Close all ends."""
        theirs = int(self.channel.libfuse.mountpoint[8:])
        self.channel.libfuse.close()
        os.close(theirs)
        for end in (self.kernel, self._device, self.libfuse):
            end.close()
