"""Handles on a store that is full, or believed to be: who waits, for what, and for how long."""

import os
from collections.abc import Callable, Iterator

import pytest
import trio
from trio.testing import MockClock

from kvfs.core.errors import DeadInode, NoSpace, NotAtHand, NotFound, OverShare
from kvfs.core.types import ROOT_INODE
from tests.support.store.counted_desk import NEW, CountedDesk, counted_desk
from tests.support.store.stores import FILE, MIB, put, settle


@pytest.fixture
def desk() -> Iterator[CountedDesk]:
    """Files over a fresh pool in memory."""
    with counted_desk() as made:
        yield made


async def test_a_write_beyond_the_capacity_is_refused(desk: CountedDesk) -> None:
    """Before a byte of it is written; and what was there is not whole, so that it goes."""
    fh, ino = desk.create(b"block")
    assert await desk.transfers.write(fh, 0, bytes(MIB)) == MIB
    with pytest.raises(NoSpace):
        await desk.transfers.write(fh, MIB, bytes(64 * MIB))
    assert desk.store.present(ino).size_bytes == MIB
    desk.files.release(fh)
    with pytest.raises(DeadInode):
        desk.store.present(ino)


async def test_pieces_written_at_once_and_in_any_order_do_not_overstep_the_pool(
    desk: CountedDesk,
) -> None:
    """The first of them reserves what the directory's blocks hold; the rest lies behind that."""
    put(desk.store, ROOT_INODE, b"usual", bytes(8 * MIB))
    desk.store.unlink(ROOT_INODE, b"usual")
    fh, ino = desk.create(b"slab")
    desk.store.truncate(ino, 96 * MIB)
    for first in range(88, 40, -8):
        async with trio.open_nursery() as nursery:
            for at in range(first, first + 8):
                nursery.start_soon(desk.transfers.write, fh, at * MIB, bytes(MIB))
    for at in (0, 8, 7):
        assert await desk.transfers.write(fh, at * MIB, bytes(MIB)) == MIB
    for at in range(9, 16):
        assert await desk.transfers.write(fh, at * MIB, bytes(MIB)) == MIB
    assert desk.store.space.used_bytes == desk.store.space.capacity_bytes == 64 * MIB
    with pytest.raises(NoSpace):
        await desk.transfers.write(fh, 16 * MIB, bytes(MIB))
    held_bytes = desk.store.extent_bytes(desk.files.extent_fd(fh))
    assert desk.store.space.used_bytes == held_bytes
    desk.files.release(fh)


async def test_a_guess_about_others_makes_a_writer_wait_and_never_fail(desk: CountedDesk) -> None:
    """A draft that grew fast is believed to take the whole pool, which is all but empty."""
    store, files = desk.store, desk.files
    store.let_writers_run()
    settle(desk.store)  # until then there may be blocks that could go
    fast, _ = desk.store.create(ROOT_INODE, b"fast", FILE, 0, 0)
    store.let_run(fast)
    fh, _ = desk.create(b"asks")
    os.pwrite(fast.fd, bytes(20 * MIB), 0)
    desk.store.watch(0.0)
    assert store.space.unclaimed_bytes < 0
    assert not store.evictable_bytes
    with pytest.raises(NoSpace):
        await desk.transfers.write(fh, 0, bytes(45 * MIB))  # beside 20 in 64: no guess matters
    assert files.room.stalls == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.transfers.write, fh, 0, bytes(MIB))
        nursery.start_soon(files.room.find, 1, ROOT_INODE)
        while files.room.stalls < 2:
            await trio.lowlevel.checkpoint()
        desk.store.close(fast, writer=True)
        desk.store.watch(0.1)
    assert os.fstat(files.extent_fd(fh)).st_size == MIB
    files.release(fh)


async def test_a_wait_for_a_guess_has_an_end(desk: CountedDesk) -> None:
    store, files = desk.store, desk.files
    store.configure(room_wait_s=0.05)
    settle(desk.store)
    store.expect_growth(store.space.capacity_bytes)
    with pytest.raises(NoSpace):
        await files.room.find(1, ROOT_INODE)
    assert files.room.longest_s >= 0.05


async def test_others_are_served_while_a_handler_waits(desk: CountedDesk) -> None:
    """It says so before it waits, and makes room before it answers; in this order."""
    said = []

    def about_to_wait() -> Callable[[], None]:
        said.append("wait")
        return lambda: said.append("answer")

    desk.files.about_to_wait = about_to_wait
    fh, _ = desk.create(b"block")
    await desk.files.sync(fh)
    assert said == ["wait", "answer"]
    desk.files.release(fh)


def read_block(desk: CountedDesk, size_bytes: int) -> int:
    """Store a block and open it for reading; return the handle."""
    put(desk.store, ROOT_INODE, b"read.tmp", bytes(size_bytes))
    desk.store.rename(ROOT_INODE, b"read.tmp", ROOT_INODE, b"read", replace=True)
    settle(desk.store)
    fh, _ = desk.files.open(desk.store.lookup(ROOT_INODE, b"read"), os.O_RDONLY)
    return fh


async def create(desk: CountedDesk, name: bytes, flags: int = NEW) -> tuple[int, float]:
    """Do what a CREATE does; return the handle and how long it took."""
    start_s = trio.current_time()
    await desk.files.find_room_to_create(ROOT_INODE, name, flags)
    fh, _, _, _ = await desk.files.open_or_create(ROOT_INODE, name, FILE, flags, 0, 0)
    return fh, trio.current_time() - start_s


async def test_a_create_does_not_wait_long_for_those_who_read(
    desk: CountedDesk, autojump_clock: MockClock
) -> None:
    """[capacity] Its directory is locked meanwhile; the draft's first write waits instead."""
    reader = read_block(desk, 64 * MIB)
    created = [await create(desk, name) for name in (b"one", b"two", b"three")]
    waited_s = [waited_s for _, waited_s in created]
    assert waited_s[0] < 0.5
    assert max(waited_s[1:]) < 0.1, "and the next ones not at all"
    writer = created[0][0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.transfers.write, writer, 0, bytes(MIB))
        await trio.sleep(0.3)
        assert os.fstat(desk.files.extent_fd(writer)).st_size == 0
        desk.files.release(reader)
    assert os.fstat(desk.files.extent_fd(writer)).st_size == MIB
    for fh, _ in created:
        desk.files.release(fh)


async def test_all_creates_together_wait_no_longer_than_one(
    desk: CountedDesk, autojump_clock: MockClock
) -> None:
    """[capacity] They come one after the other: a lookup there waits for all before it."""
    reader = read_block(desk, 64 * MIB)
    start_s = trio.current_time()
    created = [await create(desk, b"%d" % number) for number in range(200)]
    assert trio.current_time() - start_s < 0.5
    await trio.sleep(2)
    _, waited_s = again = await create(desk, b"later")
    assert 0.1 < waited_s < 0.5, "a usual load may well be over"
    for fh, _ in (*created, again):
        desk.files.release(fh)
    desk.files.release(reader)


async def test_a_truncating_open_waits_no_longer_than_a_create(
    desk: CountedDesk, autojump_clock: MockClock
) -> None:
    """Each that waits occupies one of pyfuse3's tasks, and the last one reads the requests."""
    reader = read_block(desk, 64 * MIB)
    start_s = trio.current_time()
    for _ in range(10):
        await desk.files.find_room_to_begin(ROOT_INODE)
    assert trio.current_time() - start_s < 0.5
    desk.files.release(reader)


async def waiting(desk: CountedDesk, count: int) -> None:
    """Return when *count* wait for room."""
    while desk.files.room.waiting < count:
        await trio.lowlevel.checkpoint()


async def test_the_oldest_waiter_looks_for_all(
    desk: CountedDesk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred that each search for themselves leave the loop no time for the closes."""
    looks, served = [], []
    desk.store.note_calls(monkeypatch, "search", lambda: looks.append(1))
    reader = read_block(desk, 64 * MIB)

    async def find(number: int) -> None:
        await desk.files.room.find(MIB // 2, ROOT_INODE)
        served.append(number)
        desk.store.take_space(MIB // 2)  # taken with no checkpoint in between

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(find, number)
            await waiting(desk, number + 1)
        await trio.sleep(0.1)
        assert 10 < len(looks) <= 51
        desk.files.release(reader)
    assert sorted(served) == list(range(100))
    assert desk.store.space.pledged_bytes == 0


async def test_a_waiter_that_is_cancelled_leaves_the_line_to_the_next(
    desk: CountedDesk, autojump_clock: MockClock
) -> None:
    """Else nobody would look any more."""
    reader = read_block(desk, 64 * MIB)
    room = desk.files.room
    async with trio.open_nursery() as others:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(room.find, 40 * MIB, ROOT_INODE)
            await waiting(desk, 1)
            others.start_soon(room.find, 41 * MIB, ROOT_INODE)
            await waiting(desk, 2)
            nursery.cancel_scope.cancel()
        assert room.waiting == 1
        desk.files.release(reader)
    assert (room.waiting, desk.store.space.pledged_bytes) == (0, 0)


async def test_who_floods_the_waits_is_refused_and_another_waits_on(
    desk: CountedDesk, autojump_clock: MockClock
) -> None:
    """Its write is EDQUOT at once; the other's is done as soon as there is room."""
    desk.store.configure(room_wait_bytes=8 * MIB)
    reader = read_block(desk, 64 * MIB)
    drafts = [(await create(desk, b"%d" % number))[0] for number in range(6)]
    for fh in drafts:
        desk.files.handles.hold_for(desk.files.handles.get(fh), 1000)
    desk.files.handles.hold_for(desk.files.handles.get(drafts[0]), 2000)
    async with trio.open_nursery() as nursery:
        for number, fh in enumerate(drafts[:5], 1):
            nursery.start_soon(desk.transfers.write, fh, 0, bytes(MIB))
            await waiting(desk, number)
        told = desk.store.describe()["tenants"]
        assert told["1000"]["waiting_bytes"] == 4 * told["2000"]["waiting_bytes"] > 4 * MIB
        with pytest.raises(OverShare):
            await desk.transfers.write(drafts[5], 0, bytes(MIB))
        desk.files.release(reader)
    told = desk.store.describe()["tenants"]
    assert not any(row["waiting_bytes"] for row in told.values())
    for fh in drafts:
        desk.files.release(fh)
    assert desk.store.lookup(ROOT_INODE, b"0")


async def test_what_waits_in_memory_has_a_bound(
    desk: CountedDesk, autojump_clock: MockClock
) -> None:
    """One more is refused at once; the reading of requests goes on (channel.py)."""
    transfers = desk.transfers
    desk.store.configure(room_wait_bytes=3 * MIB)  # of a desk all requests are root's
    reader = read_block(desk, 64 * MIB)
    drafts = [(await create(desk, b"%d" % number))[0] for number in range(3)]
    async with trio.open_nursery() as nursery:
        for number, fh in enumerate(drafts[:2], 1):
            nursery.start_soon(transfers.write, fh, 0, bytes(MIB))
            await waiting(desk, number)
        with pytest.raises(NoSpace):
            await transfers.write(drafts[2], 0, bytes(MIB))
        assert desk.files.room.shares.turned_away == 1
        desk.files.release(reader)
    for fh in drafts:
        desk.files.release(fh)
    assert desk.store.lookup(ROOT_INODE, b"1")
    with pytest.raises(NotFound):
        desk.store.lookup(ROOT_INODE, b"2")


async def test_a_create_is_refused_where_nothing_may_go(desk: CountedDesk) -> None:
    """[capacity] Drafts fill the pool: whatever its users do, no room comes."""
    writer, _ = desk.create(b"draft")
    await desk.transfers.write(writer, 0, bytes(64 * MIB))
    settle(desk.store)
    with pytest.raises(NoSpace):
        await create(desk, b"new")
    again, _ = await create(desk, b"draft", os.O_RDWR | os.O_CREAT)  # which needs no room
    for fh in (again, writer):
        desk.files.release(fh)


async def test_who_comes_after_a_wait_in_vain_does_not_wait_as_long(
    desk: CountedDesk, autojump_clock: MockClock
) -> None:
    """They come one after the other, and would all wait for the same readers."""
    store, files = desk.store, desk.files
    store.configure(room_wait_s=1.2)
    fh = read_block(desk, 40 * MIB)
    waited_s = []
    for _ in range(4):
        start_s = trio.current_time()
        with pytest.raises(NoSpace):
            await files.room.find(40 * MIB, ROOT_INODE)
        waited_s.append(trio.current_time() - start_s)
    assert waited_s[0] >= 1
    assert max(waited_s[1:]) < 0.5
    files.release(fh)
    await files.room.find(40 * MIB, ROOT_INODE)


async def test_whose_space_others_have_taken_each_time_waits_in_the_line(desk: CountedDesk) -> None:
    """There the oldest is served first; asking on would let the swift take all."""
    tries: list[object] = []

    def space() -> None:
        tries.append(None)
        raise NotAtHand("space", lambda: lambda: lambda: None)

    with pytest.raises(NoSpace, match="yet"):
        await desk.files.room._require(MIB, space, None)
    assert len(tries) == 8
