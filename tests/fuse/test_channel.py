"""The channel by itself: a socket stands for /dev/fuse, the test for both kernel and libfuse."""

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Final

import pytest
import trio
import trio.testing

from kvfs.types import BackingId
from mount.channel import Channel
from mount.grant import Grant
from mount.init_reply import Features
from mount.wire import (
    ENTRY_OUT_BYTES,
    FOPEN_PASSTHROUGH,
    IN_HEADER,
    IN_HEADER_BYTES,
    INIT_OUT_BYTES,
    OPEN_OUT,
    OUT_HEADER_BYTES,
    UNANSWERED,
    Opcode,
    data_reply,
    error_reply,
)
from tests.support.short_of_memory import ShortOfMemory

GRANT: Final = Grant(FOPEN_PASSTHROUGH, BackingId(77))
ROOM_BYTES: Final = 1 << 20


def request(opcode: int, unique: int, body: bytes = b"", nodeid: int = 1) -> bytes:
    """Return a whole request of process 99."""
    size_bytes = IN_HEADER_BYTES + len(body)
    return IN_HEADER.pack(size_bytes, opcode, unique, nodeid, 0, 0, 99, 0, 0) + body


class Wires:
    """A channel between two sockets; ``kernel`` and ``libfuse`` are the test's ends."""

    def __init__(self) -> None:
        self.kernel, self._device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._device.setblocking(False)
        self.channel = Channel(self._device.fileno(), max_background=100, busy_poll_us=40)
        self.libfuse = socket.socket(fileno=os.dup(int(self.channel.libfuse_mountpoint[8:])))
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

            self.channel.intake.idle = idle
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
        theirs = int(self.channel.libfuse_mountpoint[8:])
        self.channel.close()
        os.close(theirs)
        for end in (self.kernel, self._device, self.libfuse):
            end.close()


@pytest.fixture
def wires() -> Iterator[Wires]:
    """A fresh channel."""
    made = Wires()
    yield made
    made.close()


async def test_what_the_channel_does_not_know_goes_to_libfuse_and_back(wires: Wires) -> None:
    asked = request(Opcode.MKDIR, 2, struct.pack("<II", 0o755, 0) + b"name\0")
    wires.kernel.send(asked)
    assert await wires.pump() == asked
    answer = data_reply(2, bytes(128))
    wires.libfuse.send(answer)
    await wires.drain()
    assert wires.replies() == [answer]
    assert wires.channel.requests[Opcode.MKDIR] == 1
    assert wires.channel.answered_here[Opcode.MKDIR] == 0


async def test_the_present_request_is_known_to_its_handler(wires: Wires) -> None:
    wires.kernel.send(request(Opcode.STATFS, 42))
    await wires.pump()
    assert (wires.channel.present_unique, wires.channel.present.tid) == (42, 99)


async def test_an_answer_sees_the_body_and_is_sent_at_once(wires: Wires) -> None:
    seen = []

    def answer(unique: int, nodeid: int, body: memoryview) -> bytes:
        seen.append((unique, nodeid, bytes(body)))
        return data_reply(unique, b"here")

    wires.channel.serve({Opcode.LOOKUP: answer})
    wires.kernel.send(request(Opcode.LOOKUP, 2, b"name\0", 7))
    await wires.drain()
    assert seen == [(2, 7, b"name\0")]
    assert wires.replies() == [data_reply(2, b"here")]
    assert wires.channel.answered_here[Opcode.LOOKUP] == 1


@pytest.mark.parametrize("failure", [struct.error("short"), MemoryError(), KeyError(1)])
async def test_an_answer_that_raises_fails_its_call_alone(
    wires: Wires, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(unique: int, nodeid: int, body: memoryview) -> bytes:
        if nodeid == 1:
            raise failure
        return error_reply(unique, 0)

    wires.channel.serve({Opcode.OPEN: answer})
    wires.kernel.send(request(Opcode.OPEN, 2))
    wires.kernel.send(request(Opcode.OPEN, 4, nodeid=9))
    await wires.drain()
    assert wires.replies() == [error_reply(2, errno.EIO), error_reply(4, 0)]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [failure]


async def test_a_later_answer_is_the_only_one(wires: Wires) -> None:
    wires.channel.serve({Opcode.FALLOCATE: lambda *_: b""})
    wires.kernel.send(request(Opcode.FALLOCATE, 2, bytes(32)))
    await wires.drain()
    assert wires.replies() == []
    wires.channel.reply(error_reply(2, 0))
    assert wires.replies() == [error_reply(2, 0)]


async def test_who_was_first_to_serve_is_asked_second(wires: Wires) -> None:
    wires.channel.serve({Opcode.GETXATTR: lambda unique, *_: error_reply(unique, 1)})
    wires.channel.serve(
        {Opcode.GETXATTR: lambda unique, *_: error_reply(unique, 2) if unique == 2 else None}
    )
    wires.kernel.send(request(Opcode.GETXATTR, 2))
    wires.kernel.send(request(Opcode.GETXATTR, 4))
    await wires.drain()
    assert wires.replies() == [error_reply(2, 2), error_reply(4, 1)]


@pytest.mark.parametrize("opcode", [0, 63, 64, 4096, (1 << 32) - 1])
async def test_unknown_codes_share_one_answer(wires: Wires, opcode: int) -> None:
    refuse = {code: lambda unique, *_: error_reply(unique, errno.ENOSYS) for code in (0, 63)}
    wires.channel.serve(refuse)
    wires.kernel.send(request(opcode, 2, b"whatever"))
    await wires.drain()
    assert wires.replies() == [error_reply(2, errno.ENOSYS)]


async def test_malformed_requests_are_answered_before_libfuse_sees_them(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    wires.kernel.send(request(Opcode.WRITE, 2, struct.pack("<QQI", 1, 0, 1 << 20)))
    wires.kernel.send(request(Opcode.MKDIR, 4, bytes(8) + b"no end"))
    wires.kernel.send(b"less than a header")
    await wires.drain()
    assert wires.replies() == [error_reply(2, errno.EIO), error_reply(4, errno.EIO)]
    assert len(caplog.records) == 3


@pytest.mark.parametrize("opcode", sorted(UNANSWERED))
async def test_nobody_waits_for_these(wires: Wires, opcode: Opcode) -> None:
    wires.kernel.send(request(opcode, 0, bytes(16)))
    await wires.drain()
    assert wires.replies() == []
    assert wires.channel.requests[opcode] == 1


@pytest.mark.parametrize("entry_bytes", [0, ENTRY_OUT_BYTES], ids=["OPEN", "CREATE"])
async def test_a_grant_is_written_into_the_reply(wires: Wires, entry_bytes: int) -> None:
    opcode, body = (Opcode.CREATE, bytes(16) + b"n\0") if entry_bytes else (Opcode.OPEN, bytes(8))
    wires.kernel.send(request(opcode, 2, body))
    await wires.pump()
    wires.channel.granted(GRANT)
    before = os.urandom(entry_bytes)
    wires.libfuse.send(data_reply(2, before + OPEN_OUT.pack(1234, 2, 0)))
    await wires.drain()
    patched = before + OPEN_OUT.pack(1234, GRANT.open_flags, GRANT.backing_id)
    assert wires.replies() == [data_reply(2, patched)]


async def test_a_refused_open_carries_no_grant_nor_does_the_next(wires: Wires) -> None:
    for answer in (error_reply(2, errno.EIO), data_reply(2, OPEN_OUT.pack(5, 2, 0))):
        wires.kernel.send(request(Opcode.OPEN, 2, bytes(8)))
        await wires.pump()
        if len(answer) == OUT_HEADER_BYTES:
            wires.channel.granted(GRANT)
        wires.libfuse.send(answer)
        await wires.drain()
        assert wires.replies() == [answer]


async def test_no_grant_leaves_the_reply_alone(wires: Wires) -> None:
    wires.kernel.send(request(Opcode.OPEN, 2, bytes(8)))
    await wires.pump()
    wires.channel.granted(Grant(0, BackingId(0)))
    wires.libfuse.send(data_reply(2, OPEN_OUT.pack(5, 2, 0)))
    await wires.drain()
    assert wires.replies() == [data_reply(2, OPEN_OUT.pack(5, 2, 0))]


@pytest.mark.parametrize("body_bytes", [16, 20, 64], ids=["5.16", "flags2", "6.18"])
async def test_init_is_agreed_before_anything_else_is_read(wires: Wires, body_bytes: int) -> None:
    """Whatever the length of struct fuse_init_in in that kernel."""
    offered = []

    def wanted(flags: int) -> Features:
        offered.append(flags)
        return Features(1 << 37, passthrough=True, resend=False)

    told = []
    wires.channel.wanted = wanted
    wires.channel.agreed = lambda: told.append(wires.replies())
    body = struct.pack("<IIIII", 7, 45, 0, 0x11, 0x22).ljust(64, b"\0")[:body_bytes]
    wires.kernel.send(request(Opcode.INIT, 2, body))
    await wires.pump()
    wires.libfuse.send(data_reply(2, bytes(INIT_OUT_BYTES)))
    await wires.drain()
    assert offered == [0x11 | (0x22 << 32 if body_bytes > 16 else 0)]
    assert wires.channel.features == Features(1 << 37, passthrough=True, resend=False)
    [[reply]] = told
    assert struct.unpack_from("<I", reply, OUT_HEADER_BYTES + 32) == (1 << 5,)


async def test_an_init_without_its_flags_is_refused(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    wires.kernel.send(request(Opcode.INIT, 2, bytes(12)))
    await wires.drain()
    assert wires.replies() == [error_reply(2, errno.EIO)]
    assert "malformed" in caplog.text


async def test_late_replies_are_passed_on_while_no_request_comes(wires: Wires) -> None:
    """A handler that waited answers when the pump waits, too: a task of its own flushes."""
    for unique in (2, 4):
        wires.kernel.send(request(Opcode.STATFS, unique))
        await wires.pump()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wires.channel.flush_late)
        nursery.start_soon(wires.channel.next_request)
        await trio.testing.wait_all_tasks_blocked()
        wires.libfuse.send(error_reply(4, 0))
        await trio.lowlevel.wait_readable(wires.kernel)
        assert wires.replies() == [error_reply(4, 0)]
        wires.libfuse.send(error_reply(2, 0))
        await trio.lowlevel.wait_readable(wires.kernel)
        assert wires.replies() == [error_reply(2, 0)]
        nursery.cancel_scope.cancel()


async def test_a_flood_of_requests_leaves_turns_to_others(wires: Wires) -> None:
    """Else neither ticks nor signals nor the control socket would ever run."""
    wires.channel.serve({Opcode.FLUSH: lambda unique, *_: error_reply(unique, 0)})
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for unique in range(200):
            wires.kernel.send(request(Opcode.FLUSH, unique))
        await wires.drain()
        nursery.cancel_scope.cancel()
    assert len(wires.replies()) == 200
    assert turns >= 4


async def test_stop_ends_the_pump(wires: Wires) -> None:
    async with trio.open_nursery() as nursery:

        async def stop() -> None:
            await trio.testing.wait_all_tasks_blocked()
            wires.channel.stop()

        nursery.start_soon(stop)
        with pytest.raises(trio.ClosedResourceError):
            await wires.channel.next_request()


async def test_an_unmount_ends_the_pump(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> int:
        raise OSError(errno.ENODEV, "unmounted")

    monkeypatch.setattr(os, "readv", gone)
    wires.kernel.close()  # fuse_dev_poll: EPOLLERR, where a socket has EPOLLHUP
    with pytest.raises(trio.ClosedResourceError):
        await wires.channel.next_request()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOENT, errno.EINTR])
async def test_a_request_that_was_taken_back_is_nothing(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The kernel says so when the caller died between poll and read."""
    asked = request(Opcode.STATFS, 2)
    results: list[OSError | bytes] = [OSError(code, "aborted"), asked]

    def read(_fd: int, buffers: list[bytearray]) -> int:
        result = results.pop(0)
        if isinstance(result, OSError):
            raise result
        buffers[0][: len(result)] = result
        return len(result)

    monkeypatch.setattr(os, "readv", read)
    wires.kernel.send(asked)
    assert await wires.pump() == asked


@pytest.mark.parametrize(
    ("code", "lines"),
    [(errno.ENOENT, 0), (errno.EINVAL, 0), (errno.ENODEV, 0), (errno.ENOMEM, 1)],
)
async def test_a_refused_reply_harms_nobody(
    wires: Wires,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    lines: int,
) -> None:
    """Interrupted callers wait for nothing; only what should not happen is logged."""

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    with caplog.at_level(logging.WARNING):
        wires.channel.reply(error_reply(2, 0))
    assert len(caplog.records) == lines


async def test_a_request_waits_for_memory_to_be_handed_on_but_not_for_ever(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    channel, asked = wires.channel, request(Opcode.STATFS, 2)
    with monkeypatch.context() as patch:
        patch.setattr(channel, "_ours", ShortOfMemory(channel._ours, 3))
        wires.kernel.send(asked)
        assert await wires.pump() == asked
    assert len(pauses) == 3
    with monkeypatch.context() as patch:
        patch.setattr(channel, "_ours", ShortOfMemory(channel._ours, 10**6))
        wires.kernel.send(request(Opcode.STATFS, 4))
        await wires.drain()
    assert wires.replies() == [error_reply(4, errno.EIO)]
    assert "not handed on" in caplog.text
    assert sum(pauses) < 1.0


async def test_libfuse_gone_is_an_error_of_the_call(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    wires.libfuse.close()
    os.close(theirs := int(wires.channel.libfuse_mountpoint[8:]))
    try:
        wires.kernel.send(request(Opcode.STATFS, 2))
        await wires.drain()
        assert wires.replies() == [error_reply(2, errno.EIO)]
        assert "not handed on" in caplog.text
    finally:
        os.dup2(wires.kernel.fileno(), theirs)  # for the fixture to close
