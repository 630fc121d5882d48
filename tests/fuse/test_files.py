"""Handles on the store, without a kernel: what fails opens nothing, what closes publishes."""

import dataclasses
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

import pyfuse3
import pytest
import trio

from kvfs.attributes import Change
from kvfs.errors import BadHandle, DeadInode, Exists, IsADirectory, NoSpace
from kvfs.lifecycle import State
from kvfs.makers import NOBODY
from kvfs.open_inodes import OpenInode
from kvfs.store import Store
from kvfs.types import ROOT_INODE, InodeNo
from mount.data_path import DaemonPath
from mount.entries import Entries
from mount.files import Files
from mount.grant import Grant
from mount.handles import HandleKind, Handles
from mount.operations import Operations
from tests.support.stores import FILE, MIB, allocate, get, host, put, settle

NEW: Final = os.O_RDWR | os.O_CREAT


class CountedPath(DaemonPath):
    """A data path that tells which inodes it believes open, and that may refuse."""

    def __init__(self) -> None:
        self.open: set[InodeNo] = set()
        self.refuse = False

    def grant(self, opened: OpenInode, *, writer: bool) -> Grant:
        """Grant, or fail as an ioctl does."""
        if self.refuse:
            raise OSError(errno.ENOMEM, "no id")
        self.open.add(opened.ino)
        return super().grant(opened, writer=writer)

    def freed(self, opened: OpenInode) -> None:
        """Note the last one."""
        self.open.discard(opened.ino)


class Desk:
    """Files over a store, with what they keep."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = CountedPath()
        self.fd = os.memfd_create("handles")
        self.handles = Handles(self.fd)
        self.files = Files(store, self.handles, self.path, io_threads=2)
        store.pool.freed = self.path.freed

    def create(self, name: bytes, flags: int = NEW) -> tuple[int, InodeNo]:
        """Create a file in the root; return handle and inode."""
        fh, _, ino, _ = self.files.create(ROOT_INODE, name, FILE, flags, 0, 0)
        return fh, ino

    def identified(self, name: bytes) -> InodeNo:
        """Store a block that the device knows to be whole; return its inode."""
        ino = put(self.store, ROOT_INODE, name, b"bytes")
        self.store.pool.background.hurry()
        return ino

    def assert_nothing_is_open(self) -> None:
        """Assert that store, table and data path agree."""
        assert len(self.handles) == len(self.store.pool.open_inodes) == len(self.path.open) == 0


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Files over a fresh pool in memory."""
    with host() as machine:
        made = Desk(machine.start())
        try:
            yield made
        finally:
            del made.handles, made.files  # the table's mapping holds a descriptor of its own
            os.close(made.fd)
            machine.stop()


def state_of(desk: Desk, ino: InodeNo) -> State:
    """Return where in its life the inode is."""
    return State(desk.store.blocks.present(ino).state)


def inos(store: Store) -> list[InodeNo]:
    """Return what lies in the root, as listed."""
    return [ino for ino, _ in store.namespace.children(ROOT_INODE, InodeNo(0))]


def fail(*_: object, **__: object) -> None:
    """Stand for a table that has no memory for one more row."""
    raise MemoryError


async def test_the_last_writer_publishes(desk: Desk) -> None:
    first, ino = desk.create(b"block")
    second, _ = desk.files.open(ino, os.O_WRONLY)
    assert await desk.files.write(first, 0, b"bytes") == 5
    desk.files.release(first)
    assert state_of(desk, ino) is State.DRAFT
    desk.files.release(second)
    assert state_of(desk, ino) is State.LEASED
    assert get(desk.store, ROOT_INODE, b"block") == b"bytes"
    desk.assert_nothing_is_open()


async def test_a_draft_without_a_reserve_gets_it_with_its_first_bytes(desk: Desk) -> None:
    """When the room of its reserve is there by then: what went for its first bytes was as large."""
    store = desk.store
    for number in range(3):
        put(store, ROOT_INODE, b"%d.tmp" % number, bytes(20 * MIB))
        store.rename(ROOT_INODE, b"%d.tmp" % number, ROOT_INODE, b"%d" % number, replace=True)
    read = [store.blocks.open(ino, writer=False, truncate=False) for ino in inos(store)]
    fh, ino = desk.create(b"draft.tmp")
    assert store.pool.open_inodes[ino].allocated_bytes == 0, "all that could go is being read"
    store.blocks.close(read.pop(), writer=False)
    assert await desk.files.write(fh, 0, bytes(5 * MIB)) == 5 * MIB
    assert store.pool.open_inodes[ino].allocated_bytes == 20 * MIB
    desk.files.release(fh)
    assert store.pool.index.inode(ino).allocated_bytes == 5 * MIB
    for opened in read:
        store.blocks.close(opened, writer=False)
    desk.assert_nothing_is_open()


async def test_a_rewrite_waits_until_the_old_identity_is_gone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fsync when a published block is opened in place; none for appends, nor a second one."""
    synced: list[int] = []
    ino = desk.identified(b"block")
    monkeypatch.setattr(desk.store.pool.syscalls, "fsync", synced.append)
    for flags, expected in ((os.O_WRONLY | os.O_APPEND, 0), (os.O_RDONLY, 0), (os.O_RDWR, 1)):
        fh, _ = desk.files.open(ino, flags)
        await desk.files.settle_rewrite(fh)
        assert len(synced) == expected
        if flags == os.O_RDWR:
            again, _ = desk.files.open(ino, flags)
            await desk.files.settle_rewrite(again)
            assert len(synced) == expected
            desk.files.release(again)
        desk.files.release(fh)
        desk.store.pool.background.hurry()
    desk.assert_nothing_is_open()


async def test_the_kernel_gets_a_rewrites_handle_after_that_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the handler: what is written with the handle must not reach the device before."""
    order: list[str] = []
    ino = desk.identified(b"block")
    monkeypatch.setattr(desk.store.pool.syscalls, "fsync", lambda _: order.append("fsync"))
    entries = Entries(desk.store.pool.settings, 0)
    operations = Operations(
        desk.store,
        desk.files,
        entries,
        granted=lambda _: order.append("granted"),
        removed=lambda _: None,
        thread=lambda: 0,
    )
    told = await operations.open(ino, os.O_RDWR, pyfuse3.RequestContext())
    assert order == ["fsync", "granted"]
    desk.files.release(told.fh)
    desk.assert_nothing_is_open()


async def test_a_sync_vouches_for_what_was_final_when_it_began(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab renamed meanwhile may have bytes that are not on the device: no identity yet."""
    store, pool = desk.store, desk.store.pool
    slabs = {}
    for name in (b"before", b"meanwhile"):
        fh, slabs[name] = desk.create(b"." + name)
        allocate(store, desk.handles.get(fh).opened, 8192)
        assert await desk.files.write(fh, 0, b"x" * 8192) == 8192
        desk.files.release(fh)
    identified: list[list[bool]] = []

    def rename(name: bytes) -> None:
        store.rename(ROOT_INODE, b"." + name, ROOT_INODE, name, replace=True)

    def sync() -> None:
        identified.append([pool.extents.identity(ino) is not None for ino in slabs.values()])
        if len(identified) == 1:
            trio.from_thread.run_sync(rename, b"meanwhile")

    monkeypatch.setattr(pool.background, "submit_long", lambda _: None)  # the thread is busy
    monkeypatch.setattr(pool, "sync", sync)
    rename(b"before")
    await desk.files.sync_names()
    assert identified == [[False, False], [True, False]]
    monkeypatch.undo()


def test_create_for_reading_publishes_at_once(desk: Desk) -> None:
    """open(O_RDONLY | O_CREAT): an empty file that nobody writes."""
    fh, ino = desk.create(b"empty", os.O_RDONLY | os.O_CREAT)
    assert state_of(desk, ino) is State.LEASED
    assert desk.handles.get(fh).kind is HandleKind.READER
    desk.files.release(fh)
    desk.assert_nothing_is_open()


async def test_create_opens_what_is_there_unless_told_otherwise(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(flags: int) -> tuple[int, InodeNo]:
        fh, _, found, _ = await desk.files.open_or_create(ROOT_INODE, b"block", FILE, flags, 0, 0)
        return fh, found

    ino = desk.identified(b"block")
    with pytest.raises(Exists):
        await create(NEW | os.O_EXCL)
    synced: list[int] = []
    monkeypatch.setattr(desk.store.pool.syscalls, "fsync", synced.append)
    fh, found = await create(NEW)
    assert found == ino
    assert synced == [desk.handles.get(fh).opened.fd]  # the device forgot that it was whole
    desk.files.release(fh)
    # The kernel looks the name up again; for a thread it cannot tell the inode is fresh at once.
    with pytest.raises(DeadInode):
        await create(NEW | os.O_TRUNC)
    assert get(desk.store, ROOT_INODE, b"block") == b""
    desk.store.blocks.superseding.close()  # who was refused never comes
    desk.assert_nothing_is_open()


@pytest.mark.parametrize("flags", [NEW, NEW | os.O_TRUNC, os.O_RDONLY | os.O_CREAT])
async def test_a_create_leaves_the_check_of_permissions_to_the_kernel(
    desk: Desk, flags: int
) -> None:
    """Behind a CREATE it makes none: ESTALE, and it comes back by LOOKUP, its check and OPEN.

    That LOOKUP supersedes nothing, and an OPEN that is refused then, too, leaves nothing behind
    that would hit the thread's next one.
    """
    store, superseding = desk.store, desk.store.blocks.superseding
    desk.files.thread = lambda: 7
    ino = put(store, ROOT_INODE, b"block", b"bytes")
    store.attributes.change(ino, Change(mode=0o600))
    with pytest.raises(DeadInode):
        await desk.files.open_or_create(ROOT_INODE, b"block", FILE, flags, 1000, 1000)
    assert superseding.looked_up(ino, 7, NOBODY) == ino
    if flags & os.O_TRUNC:
        with pytest.raises(DeadInode):
            desk.files.open(ino, flags)
    else:
        desk.files.release(desk.files.open(ino, flags)[0])
    assert not superseding.retrying
    assert get(store, ROOT_INODE, b"block") == b"bytes"
    desk.assert_nothing_is_open()


async def test_a_create_opens_no_directory(desk: Desk) -> None:
    """The kernel finds out by itself what stands there."""
    desk.store.namespace.make_node(ROOT_INODE, b"d", stat.S_IFDIR | 0o777, 0, 0)
    with pytest.raises(DeadInode):
        await desk.files.open_or_create(ROOT_INODE, b"d", FILE, NEW, 0, 0)


@pytest.mark.parametrize("flags", [NEW, os.O_RDONLY | os.O_CREAT])
def test_a_create_that_cannot_be_recorded_leaves_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """Neither a writer that nobody closes nor an empty block that others would load."""
    monkeypatch.setattr(desk.handles, "open", fail)
    with pytest.raises(MemoryError):
        desk.create(b"block", flags)
    monkeypatch.undo()
    assert len(desk.store.pool.open_inodes) == 0
    assert inos(desk.store) == []


def test_an_emptying_open_that_cannot_be_recorded_leaves_no_empty_block(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name went to a draft that nobody has now: a miss."""
    ino = put(desk.store, ROOT_INODE, b"block", b"bytes")
    with pytest.raises(DeadInode):
        desk.files.open(ino, os.O_WRONLY | os.O_TRUNC)
    monkeypatch.setattr(desk.handles, "open", fail)
    fresh = desk.store.namespace.lookup(ROOT_INODE, b"block")
    with pytest.raises(MemoryError):
        desk.files.open(fresh, os.O_WRONLY | os.O_TRUNC)
    monkeypatch.undo()
    desk.assert_nothing_is_open()
    assert inos(desk.store) == []


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_an_open_that_fails_late_opens_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """Whether the data path refuses or the table of handles does."""
    ino = put(desk.store, ROOT_INODE, b"block", b"bytes")
    desk.path.refuse = True
    with pytest.raises(OSError, match="no id"):
        desk.files.open(ino, flags)
    desk.path.refuse = False
    desk.assert_nothing_is_open()
    monkeypatch.setattr(desk.handles, "open", fail)
    with pytest.raises(MemoryError):
        desk.files.open(ino, flags)
    monkeypatch.undo()
    desk.assert_nothing_is_open()
    assert state_of(desk, ino) is State.LEASED


def test_a_failed_open_beside_others_takes_nothing_from_them(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = put(desk.store, ROOT_INODE, b"block", b"bytes")
    fh, _ = desk.files.open(ino, os.O_RDONLY)
    monkeypatch.setattr(desk.handles, "open", fail)
    with pytest.raises(MemoryError):
        desk.files.open(ino, os.O_RDWR)
    monkeypatch.undo()
    assert desk.path.open == {ino}
    desk.files.release(fh)
    desk.assert_nothing_is_open()


async def test_a_handle_does_what_it_was_opened_for(desk: Desk) -> None:
    ino = put(desk.store, ROOT_INODE, b"block", b"bytes")
    reader, _ = desk.files.open(ino, os.O_RDONLY)
    directory = desk.files.open_directory(ROOT_INODE)
    assert await desk.files.read(reader, 1, 100) == b"ytes"
    assert await desk.files.read(reader, 100, 100) == b""
    with pytest.raises(BadHandle):
        await desk.files.write(reader, 0, b"no")
    with pytest.raises(BadHandle):
        await desk.files.read(directory, 0, 1)
    for fh in (reader, directory):
        desk.files.release(fh)
        with pytest.raises(BadHandle):
            desk.files.release(fh)
    with pytest.raises(BadHandle):
        await desk.files.read(reader, 0, 1)


def test_what_is_no_file_is_not_opened(desk: Desk) -> None:
    with pytest.raises(IsADirectory):
        desk.files.open(ROOT_INODE, os.O_RDONLY)
    with pytest.raises(DeadInode):
        desk.files.open(InodeNo(999_999), os.O_RDONLY)
    desk.assert_nothing_is_open()


async def test_a_write_beyond_the_capacity_is_refused(desk: Desk) -> None:
    """Before a byte of it is written; and what was there is not whole, so that it goes."""
    fh, ino = desk.create(b"block")
    assert await desk.files.write(fh, 0, bytes(MIB)) == MIB
    with pytest.raises(NoSpace):
        await desk.files.write(fh, MIB, bytes(64 * MIB))
    assert desk.store.blocks.present(ino).size_bytes == MIB
    desk.files.release(fh)
    with pytest.raises(DeadInode):
        desk.store.blocks.present(ino)


async def test_pieces_written_at_once_and_in_any_order_do_not_overstep_the_pool(desk: Desk) -> None:
    """The first of them reserves what the directory's blocks hold; the rest lies behind that."""
    space = desk.store.pool.space
    put(desk.store, ROOT_INODE, b"usual", bytes(8 * MIB))
    desk.store.namespace.unlink(ROOT_INODE, b"usual")
    fh, ino = desk.create(b"slab")
    desk.store.blocks.truncate(ino, 96 * MIB)
    for first in range(88, 40, -8):
        async with trio.open_nursery() as nursery:
            for at in range(first, first + 8):
                nursery.start_soon(desk.files.write, fh, at * MIB, bytes(MIB))
    for at in (0, 8, 7):
        assert await desk.files.write(fh, at * MIB, bytes(MIB)) == MIB
    for at in range(9, 16):
        assert await desk.files.write(fh, at * MIB, bytes(MIB)) == MIB
    assert space.used_bytes == space.capacity_bytes == 64 * MIB
    with pytest.raises(NoSpace):
        await desk.files.write(fh, 16 * MIB, bytes(MIB))
    assert space.used_bytes == desk.store.pool.extents.allocated_bytes(desk.files.extent_fd(fh))
    desk.files.release(fh)


async def test_a_guess_about_others_makes_a_writer_wait_and_never_fail(desk: Desk) -> None:
    """A draft that grew fast is believed to take the whole pool, which is all but empty."""
    pool, files = desk.store.pool, desk.files
    pool.writers_run_free = True
    settle(desk.store)  # until then there may be blocks that could go
    fast, _ = desk.store.blocks.create(ROOT_INODE, b"fast", FILE, 0, 0)
    pool.open_inodes.let_run(fast)
    fh, _ = desk.create(b"asks")
    os.pwrite(fast.fd, bytes(20 * MIB), 0)
    desk.store.watch.tick(0.0)
    assert pool.space.unclaimed_bytes < 0
    assert not pool.evictable_bytes
    with pytest.raises(NoSpace):
        await files.write(fh, 0, bytes(45 * MIB))  # beside 20 in 64: no guess is in the way
    assert files.room.stalls == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.write, fh, 0, bytes(MIB))
        nursery.start_soon(files.find_room, 1)  # as a create does
        while files.room.stalls < 2:
            await trio.lowlevel.checkpoint()
        desk.store.blocks.close(fast, writer=True)
        desk.store.watch.tick(0.1)
    assert os.fstat(files.extent_fd(fh)).st_size == MIB
    files.release(fh)


async def test_a_wait_for_a_guess_has_an_end(desk: Desk) -> None:
    pool, files = desk.store.pool, desk.files
    pool.settings = dataclasses.replace(pool.settings, room_wait_s=0.05)
    settle(desk.store)
    pool.space.lacking_bytes = pool.space.capacity_bytes
    with pytest.raises(NoSpace):
        await files.find_room(1)
    assert files.room.longest_s >= 0.05


async def test_others_are_served_while_a_handler_waits(desk: Desk) -> None:
    """It says so before it waits, and makes room before it answers; in this order."""
    said = []

    def about_to_wait() -> Callable[[], None]:
        said.append("wait")
        return lambda: said.append("answer")

    desk.files.about_to_wait = about_to_wait
    fh, _ = desk.create(b"block")
    await desk.files.write(fh, 0, b"bytes")
    await desk.files.read(fh, 0, 5)
    assert said == ["wait", "answer"] * 2
    desk.files.release(fh)
