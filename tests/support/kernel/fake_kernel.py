"""A server of kvfs whose /dev/fuse is a socket that the test holds: the test plays the kernel.

So it can say what Linux never says. The server is a process of its own, started as an operator
starts it: a crash in libfuse fails the test, not the run.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.client.control_socket import ask
from kvfs.core.mount_name import name_of, socket_path
from mount.fuse.wire import IN_HEADER, IN_HEADER_BYTES, OUT_HEADER, OUT_HEADER_BYTES, Opcode
from tests.support.mounts.mounting import ROOT, workplace
from tests.support.mounts.unsupervised import UNSUPERVISED

#: Two cores are shared by all; what takes longer than this hangs.
WAIT_S: Final = 60.0
MESSAGE_MAX_BYTES: Final = (1 << 20) + 65536
_SOCKET_BUFFER_BYTES: Final = 8 << 20
_SERVER: Final = f"""
import itertools, os, sys
from kvfs.machine import mount_table
import mount.serve
from mount.fuse import kernel
device_fd = int(sys.argv.pop(1))
backing_errno = int(sys.argv.pop(1))
ids = itertools.count(1)
def open_backing(device_fd, extent_fd):
    if backing_errno:
        raise OSError(backing_errno, os.strerror(backing_errno))
    return next(ids)
kernel.open_device = lambda: device_fd
kernel.detached = lambda *args, **kwargs: os.open("/", os.O_PATH)
mount.serve.place = mount_table.unmount = kernel.close_backing = lambda *args, **kwargs: None
kernel.open_backing = open_backing
{UNSUPERVISED}
from kvfs.cli.main import main
sys.exit(main())
"""


class Reply(NamedTuple):
    """One whole message from the server; ``code`` is 0 or a negative errno."""

    length_bytes: int
    code: int
    unique: int
    payload: bytes


class FakeKernel:
    """The kernel's end of one connection."""

    def __init__(
        self, device: socket.socket, server: "subprocess.Popen[bytes]", mountpoint: Path
    ) -> None:
        self.server = server
        self.log_file = mountpoint.with_suffix(".log")
        self._device = device
        self._mountpoint = mountpoint
        self._unique = 0
        self.sender = os.getpid()
        """Thread that makes the requests; 0: one of another pid namespace."""

    def send(self, opcode: int, nodeid: int = 1, body: bytes = b"") -> int:
        """Send one request of root's and return its ``unique``."""
        self._unique += 2  # as the kernel counts; odd ones are interrupts
        head = IN_HEADER.pack(
            IN_HEADER_BYTES + len(body), opcode, self._unique, nodeid, 0, 0, self.sender, 0, 0
        )
        self.send_raw(head + body)
        return self._unique

    def send_raw(self, message: bytes) -> None:
        """Send *message* as it is."""
        self._device.send(message)

    def receive(self) -> Reply:
        """Return the next reply. Fails when none comes or the server died."""
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        assert poll.poll(WAIT_S * 1000), "no reply"
        message = self._device.recv(MESSAGE_MAX_BYTES)
        assert message, f"the server is gone: {self.server.poll()}"
        length_bytes, code, unique = OUT_HEADER.unpack_from(message)
        return Reply(length_bytes, code, unique, message[OUT_HEADER_BYTES:])

    def has_reply(self) -> bool:
        """Tell whether a reply lies ready."""
        return bool(select.select([self._device], [], [], 0)[0])

    def call(self, opcode: int, nodeid: int = 1, body: bytes = b"") -> Reply:
        """Send one request and return the next reply, which must be its own."""
        unique = self.send(opcode, nodeid, body)
        reply = self.receive()
        assert reply.unique == unique
        return reply

    def init(self, flags: int = (1 << 64) - 1) -> Reply:
        """Agree on a protocol: struct fuse_init_in of Linux 6.18, offering *flags*."""
        words = [7, 45, 1 << 17, flags & 0xFFFFFFFF, flags >> 32, *([0] * 11)]
        return self.call(Opcode.INIT, 0, b"".join(word.to_bytes(4, "little") for word in words))

    def status(self) -> dict[str, Any]:
        """Return what the server says of itself."""
        return ask(socket_path(name_of(str(self._mountpoint))), "status")


@contextlib.contextmanager
def fake_kernel(*flags: str, backing_errno: int = errno.ENOTTY) -> Iterator[FakeKernel]:
    """Yield the kernel's end of a server with a fresh pool in memory, and end the server.

    Backing ids are refused with *backing_errno*, or given out if that is 0.
    """
    with workplace() as directory, contextlib.ExitStack() as stack:
        for name in ("pool", "kv"):
            (directory / name).mkdir()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(ours.close)
        for end in (ours, theirs):
            # SO_SNDBUFFORCE and SO_RCVBUFFORCE of socket(7): beyond wmem_max.
            end.setsockopt(socket.SOL_SOCKET, 32, _SOCKET_BUFFER_BYTES)
            end.setsockopt(socket.SOL_SOCKET, 33, _SOCKET_BUFFER_BYTES)
        with theirs:
            os.set_blocking(theirs.fileno(), False)
            numbers = [str(theirs.fileno()), str(backing_errno)]
            command = [sys.executable, "-c", _SERVER, *numbers, "mount", "--foreground"]
            places = [str(directory / "pool"), str(directory / "kv")]
            log = ["--log-file", str(directory / "kv.log")]
            server = subprocess.Popen(
                [*command, *places, *log, *flags],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stderr=subprocess.PIPE,
            )
        try:
            yield FakeKernel(ours, server, directory / "kv")
        finally:
            _end(server)


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(WAIT_S)
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()
