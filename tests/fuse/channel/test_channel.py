"""The channel by itself: a socket stands for /dev/fuse, the test for both kernel and libfuse."""

import errno
import logging
import os
import struct
from typing import Final

import pytest
import trio
import trio.testing

from kvfs.core.types import BackingId
from mount.fuse.init_reply import Features
from mount.fuse.wire import (
    ENTRY_OUT_BYTES,
    FOPEN_PASSTHROUGH,
    IN_HEADER_BYTES,
    INIT_OUT_BYTES,
    OPEN_OUT,
    OUT_HEADER_BYTES,
    READ_IN,
    UNANSWERED,
    Grant,
    Opcode,
    data_reply,
    error_reply,
)
from tests.support.kernel.wires import Wires, in_python, request

GRANT: Final = Grant(FOPEN_PASSTHROUGH, BackingId(77))


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
    assert (wires.channel.present.unique, wires.channel.present.tid) == (42, 99)


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
    wires.channel.libfuse.grants.add(2, GRANT)
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
            wires.channel.libfuse.grants.add(2, GRANT)
        wires.libfuse.send(answer)
        await wires.drain()
        assert wires.replies() == [answer]


async def test_no_grant_leaves_the_reply_alone(wires: Wires) -> None:
    wires.kernel.send(request(Opcode.OPEN, 2, bytes(8)))
    await wires.pump()
    wires.channel.libfuse.grants.add(2, Grant(0, BackingId(0)))
    wires.libfuse.send(data_reply(2, OPEN_OUT.pack(5, 2, 0)))
    await wires.drain()
    assert wires.replies() == [data_reply(2, OPEN_OUT.pack(5, 2, 0))]


@pytest.mark.parametrize("body_bytes", [16, 20, 64], ids=["5.16", "flags2", "6.18"])
async def test_init_is_agreed_before_anything_else_is_read(wires: Wires, body_bytes: int) -> None:
    """Whatever the length of struct fuse_init_in in that kernel."""
    offered = []

    def wanted(flags: int, asked: bytes) -> Features:
        assert asked == request(Opcode.INIT, 2, body)
        offered.append(flags)
        return Features(1 << 37, passthrough=True, resend=False)

    told = []
    wires.agreement.features = wanted
    wires.agreement.begin = lambda features: told.append((features, wires.replies()))
    body = struct.pack("<IIIII", 7, 45, 0, 0x11, 0x22).ljust(64, b"\0")[:body_bytes]
    wires.kernel.send(request(Opcode.INIT, 2, body))
    await wires.pump()
    wires.libfuse.send(data_reply(2, bytes(INIT_OUT_BYTES)))
    await wires.drain()
    assert offered == [0x11 | (0x22 << 32 if body_bytes > 16 else 0)]
    [(features, [reply])] = told
    assert features == Features(1 << 37, passthrough=True, resend=False)
    assert struct.unpack_from("<I", reply, OUT_HEADER_BYTES + 32) == (1 << 5,)


async def test_an_init_without_its_flags_is_refused(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    wires.kernel.send(request(Opcode.INIT, 2, bytes(12)))
    await wires.drain()
    assert wires.replies() == [error_reply(2, errno.EIO)]
    assert "malformed" in caplog.text


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


@in_python
async def test_an_unmount_ends_the_pump(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> int:
        raise OSError(errno.ENODEV, "unmounted")

    monkeypatch.setattr(os, "readv", gone)
    wires.kernel.close()  # fuse_dev_poll: EPOLLERR, where a socket has EPOLLHUP
    with pytest.raises(trio.ClosedResourceError):
        await wires.channel.next_request()


@in_python
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


@pytest.mark.parametrize("opcode", [Opcode.READDIR, Opcode.READDIRPLUS])
async def test_libfuse_answers_no_more_than_a_socket_surely_takes(
    wires: Wires, opcode: Opcode
) -> None:
    """A larger reply wants its memory in one piece; libfuse drops it where there is none."""
    for unique, (asked_bytes, passed_bytes) in enumerate([(4096, 4096), (1 << 20, 64 << 10)], 1):
        body = struct.pack("<QQIIQII", 7, 8, asked_bytes, 1, 2, 3, 0)
        wires.kernel.send(request(opcode, unique, body))
        handed = await wires.pump()
        assert handed[IN_HEADER_BYTES:] == struct.pack("<QQIIQII", 7, 8, passed_bytes, 1, 2, 3, 0)
        wires.libfuse.send(data_reply(unique, b""))


async def test_libfuse_gone_is_an_error_of_the_call(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    wires.libfuse.close()
    os.close(theirs := int(wires.channel.libfuse.mountpoint[8:]))
    try:
        wires.kernel.send(request(Opcode.STATFS, 2))
        await wires.drain()
        assert wires.replies() == [error_reply(2, errno.EIO)]
        assert "not handled" in caplog.text
    finally:
        os.dup2(wires.kernel.fileno(), theirs)  # for the fixture to close


async def test_libfuse_is_asked_for_no_longer_listing_than_its_socket_takes(wires: Wires) -> None:
    """It drops a reply that the socket refuses, and the kernel would wait for ever."""
    for size_bytes, asked_bytes in ((4096, 4096), (1 << 20, 64 << 10)):
        body = READ_IN.pack(9, 0, size_bytes, 0, 0, 0, 0)
        wires.kernel.send(request(Opcode.READDIR, 2, body))
        passed = await wires.pump()
        assert READ_IN.unpack_from(passed, IN_HEADER_BYTES)[2] == asked_bytes
        wires.libfuse.send(data_reply(2, b""))
        await wires.drain()
