"""Which of pyfuse3's tasks reads the next request."""

import pytest
import trio
import trio.testing

from mount.fuse.libfuse_pair import PumpLock
from mount.fuse.wire import Opcode
from tests.support.kernel.wires import Wires, in_python, request


async def test_the_reader_keeps_the_lock_until_it_must_wait() -> None:
    """Another task reads only when a handler says that it is about to wait."""
    lock = PumpLock()
    order = []

    async def reader(name: str) -> None:
        for step in range(3):
            async with lock:
                order.append(name)
            if step == 1:
                lock.hand_over()
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["a", "a", "a"]
        await lock.__aenter__()
        nursery.start_soon(reader, "b")
        nursery.start_soon(reader, "c")
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["a", "a", "a"]
        await lock.__aexit__(None, None, None)
        lock.hand_over()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(order[3:5]) in (["b", "b"], ["c", "c"])
        lock.hand_over()


async def test_the_end_of_the_mount_wakes_every_reader() -> None:
    lock = PumpLock()
    ended = []

    async def reader() -> None:
        async with lock:
            ended.append(1)

    async with trio.open_nursery() as nursery:
        await lock.__aenter__()
        for _ in range(3):
            nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        await lock.__aexit__(trio.ClosedResourceError, None, None)
    assert len(ended) == 3


@pytest.mark.parametrize("held", [True, False])
async def test_readers_that_see_the_end_by_themselves_leave_none_behind(held: bool) -> None:
    """So pyfuse3's do once its session is told to end: they take no request, and raise nothing."""
    lock = PumpLock()
    ended = []

    async def reader() -> None:
        async with lock:
            ended.append(1)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await lock.__aenter__()
            for _ in range(3):
                nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked()
            if held:
                lock.end()
                await trio.testing.wait_all_tasks_blocked()
                await lock.__aexit__(None, None, None)
            else:
                await lock.__aexit__(None, None, None)
                lock.end()
    assert len(ended) == 3


@in_python
async def test_a_channel_that_stops_between_two_turns_leaves_no_reader_behind(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pump still hands a request on that was there, and comes back no more."""
    channel, ended = wires.channel, []
    begin_turn = channel.reader.begin_turn

    def stop_meanwhile() -> None:
        begin_turn()
        channel.stop()

    async def reader() -> None:
        async with channel.libfuse.lock:
            if not channel.requests[Opcode.STATFS]:
                await channel.next_request()
        ended.append(1)

    monkeypatch.setattr(channel.reader, "begin_turn", stop_meanwhile)
    wires.kernel.send(request(Opcode.STATFS, 2))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(reader)
    assert len(ended) == 3
