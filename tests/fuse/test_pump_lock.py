"""Which of pyfuse3's tasks reads the next request."""

import trio
import trio.testing

from mount.channel import PumpLock


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
