"""Answers that come later: by a task of ours, or by a handler that waited."""

import pytest
import trio
import trio.testing

from mount.fuse.channel import TIMED_OF
from mount.fuse.wire import IN_HEADER, OUT_HEADER, OUT_HEADER_BYTES, Opcode, data_reply, error_reply
from tests.support.clients.stepping import STEP_WAIT_S
from tests.support.kernel.wires import Wires, in_python, request


async def test_a_later_answer_is_the_only_one(wires: Wires) -> None:
    wires.channel.serve({Opcode.FALLOCATE: lambda *_: b""})
    wires.kernel.send(request(Opcode.FALLOCATE, 2, bytes(32)))
    await wires.drain()
    assert wires.replies() == []
    wires.channel.reply(error_reply(2, 0))
    assert wires.replies() == [error_reply(2, 0)]


async def test_a_later_answer_ends_the_time_of_its_request(wires: Wires) -> None:
    """One that libfuse gives is tried on a mount (test_request_times.py)."""
    channel = wires.channel
    channel.serve({Opcode.FALLOCATE: lambda *_: b""})
    for number in range(TIMED_OF):
        wires.kernel.send(request(Opcode.FALLOCATE, 2 * number + 2, bytes(32)))
    await wires.drain()
    assert list(channel.times.running) == [2 * TIMED_OF]
    channel.reply_late(OUT_HEADER.pack(OUT_HEADER_BYTES, 0, 2 * TIMED_OF), b"")
    assert not channel.times.running
    assert sum(channel.times.by_code[Opcode.FALLOCATE].counts) == 1


async def test_no_more_is_read_while_too_many_answers_are_late(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may hold a megabyte."""
    monkeypatch.setattr("mount.fuse.channel._LATE_MAX", 2)
    wires.channel.serve({Opcode.WRITE: lambda *_: b""})
    for unique in (2, 4, 6):
        wires.kernel.send(request(Opcode.WRITE, unique, b"bytes"))
    wires.kernel.send(request(Opcode.STATFS, 8))
    got: list[bytes] = []

    async def pump() -> None:
        got.append(await wires.pump())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump)
        for read, unique in ((2, 4), (3, 2)):
            await trio.testing.wait_all_tasks_blocked()
            assert wires.channel.requests[Opcode.WRITE] == read
            assert not got
            header = OUT_HEADER.pack(OUT_HEADER_BYTES + 4, 0, unique)
            wires.channel.reply_late(header, b"done")
    assert [IN_HEADER.unpack_from(asked)[2] for asked in got] == [8]
    assert wires.replies() == [data_reply(unique, b"done") for unique in (4, 2)]


async def test_requests_are_read_while_late_answers_wait_for_room(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close that makes some may be the next one."""
    monkeypatch.setattr("mount.fuse.channel._LATE_MAX", 1)
    wires.channel.serve({Opcode.WRITE: lambda *_: b""})
    go_on = []
    for unique in (2, 4, 6):
        wires.kernel.send(request(Opcode.WRITE, unique, b"bytes"))
        go_on.append(wires.channel.owed.stand_aside())
    wires.kernel.send(request(Opcode.STATFS, 8))
    assert IN_HEADER.unpack_from(await wires.pump())[2] == 8
    for step in go_on:
        step()
    wires.kernel.send(request(Opcode.STATFS, 10))
    got: list[bytes] = []

    async def pump() -> None:
        got.append(await wires.pump())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump)
        for unique in (2, 4, 6):
            await trio.testing.wait_all_tasks_blocked()
            assert not got, "they are under way again"
            wires.channel.reply_late(OUT_HEADER.pack(OUT_HEADER_BYTES + 4, 0, unique), b"done")


async def test_a_pump_that_waits_for_late_answers_can_be_stopped(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mount.fuse.channel._LATE_MAX", 1)
    wires.channel.serve({Opcode.WRITE: lambda *_: b""})
    wires.kernel.send(request(Opcode.WRITE, 2, b"bytes"))

    async def pump() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await wires.channel.next_request()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump)
        await trio.testing.wait_all_tasks_blocked()
        wires.channel.stop()


@in_python
async def test_a_pump_that_lets_the_others_have_their_turn_can_be_stopped(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that turn it waits for nothing that a stop could end; no request comes after it."""
    reader = wires.channel.reader
    begin_turn = reader.begin_turn

    def begin_after_a_stop() -> None:
        wires.channel.stop()
        begin_turn()

    monkeypatch.setattr(reader, "begin_turn", begin_after_a_stop)
    with trio.fail_after(STEP_WAIT_S), pytest.raises(trio.ClosedResourceError):
        await wires.channel.next_request()


async def test_late_replies_are_passed_on_while_no_request_comes(wires: Wires) -> None:
    """A handler that waited answers when the pump waits, too: a task of its own flushes."""
    for unique in (2, 4):
        wires.kernel.send(request(Opcode.STATFS, unique))
        await wires.pump()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wires.channel.libfuse.flush_late)
        nursery.start_soon(wires.channel.next_request)
        await trio.testing.wait_all_tasks_blocked()
        wires.libfuse.send(error_reply(4, 0))
        await trio.lowlevel.wait_readable(wires.kernel)
        assert wires.replies() == [error_reply(4, 0)]
        wires.libfuse.send(error_reply(2, 0))
        await trio.lowlevel.wait_readable(wires.kernel)
        assert wires.replies() == [error_reply(2, 0)]
        nursery.cancel_scope.cancel()
