"""Handles on the store, without a kernel: what fails opens nothing, what closes publishes."""

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyfuse3
import pytest

from kvfs.core.errors import BadHandle, DeadInode, Exists, IsADirectory
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.machine.processes import NOBODY
from mount.files.handles import HandleKind
from mount.fuse.channel import Requester
from mount.requests.answers import Answers, Generations
from mount.requests.changes import Changes
from mount.requests.operations import Operations
from tests.support.clients.stepping import until
from tests.support.store.counted_desk import NEW, CountedDesk, counted_desk
from tests.support.store.driven import Driven, NewAttributes
from tests.support.store.stores import FILE, MIB, allocate, get, put


@pytest.fixture
def desk() -> Iterator[CountedDesk]:
    """Files over a fresh pool in memory."""
    with counted_desk() as made:
        yield made


def state_of(desk: CountedDesk, ino: InodeNo) -> State:
    """Return where in its life the inode is."""
    return State(desk.store.present(ino).state)


def inos(store: Driven) -> list[InodeNo]:
    """Return what lies in the root, as listed."""
    return [ino for ino, _ in store.children(ROOT_INODE, InodeNo(0))]


def fail(*_: object, **__: object) -> None:
    """Stand for a table that has no memory for one more row."""
    raise MemoryError


async def test_the_last_writer_publishes(desk: CountedDesk) -> None:
    first, ino = desk.create(b"block")
    second, _ = desk.files.open(ino, os.O_WRONLY)
    assert await desk.transfers.write(first, 0, b"bytes") == 5
    desk.close_file(first)
    assert state_of(desk, ino) is State.DRAFT
    desk.close_file(second)
    assert state_of(desk, ino) is State.LEASED
    assert get(desk.store, ROOT_INODE, b"block") == b"bytes"
    desk.assert_nothing_is_open()


def test_a_close_is_heard_of_until_the_next_writer_comes(desk: CountedDesk) -> None:
    """What a stop goes by when a RELEASE was lost (Blocks.close_all)."""
    fh, ino = desk.create(b"block")
    opened = desk.store.opened(ino)
    assert not opened.flushed
    reader, _ = desk.files.open(ino, os.O_RDONLY)
    desk.files.flush(reader, 0)
    assert not opened.flushed
    desk.files.flush(fh, 0)
    assert opened.flushed
    again, _ = desk.files.open(ino, os.O_WRONLY)
    assert not opened.flushed
    for each in (fh, reader, again):
        desk.files.release(each)


async def test_a_draft_without_a_reserve_gets_it_with_its_first_bytes(desk: CountedDesk) -> None:
    """When the room of its reserve is there by then: what went for its first bytes was as large."""
    store = desk.store
    for number in range(3):
        put(store, ROOT_INODE, b"%d.tmp" % number, bytes(20 * MIB))
        store.rename(ROOT_INODE, b"%d.tmp" % number, ROOT_INODE, b"%d" % number, replace=True)
    read = [store.open(ino, writer=False, truncate=False) for ino in inos(store)]
    fh, ino = desk.create(b"draft.tmp")
    assert store.opened(ino).allocated_bytes == 0, "all that could go is being read"
    store.close(read.pop(), writer=False)
    assert await desk.transfers.write(fh, 0, bytes(5 * MIB)) == 5 * MIB
    assert store.opened(ino).allocated_bytes == 20 * MIB
    desk.close_file(fh)
    store.settle_closes()
    assert store.row(ino).allocated_bytes == 5 * MIB
    for opened in read:
        store.close(opened, writer=False)
    desk.assert_nothing_is_open()


async def test_a_rewrite_waits_until_the_old_identity_is_gone(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fsync when a durable block is opened to be written, also to append; and no second one."""
    synced: list[int] = []
    ino = desk.identified(b"block")
    monkeypatch.setattr(desk.store.syscalls, "fsync", synced.append)
    for flags, expected in ((os.O_RDONLY, 0), (os.O_RDWR, 1), (os.O_WRONLY | os.O_APPEND, 1)):
        synced.clear()
        fh, _ = desk.files.open(ino, flags)
        await desk.files.settle_rewrite(fh)
        assert len(synced) == expected
        if flags == os.O_RDWR:
            again, _ = desk.files.open(ino, flags)
            await desk.files.settle_rewrite(again)
            assert len(synced) == expected
            desk.close_file(again)
        desk.close_file(fh)
        with monkeypatch.context() as real:
            real.undo()
            desk.store.sync()
    desk.assert_nothing_is_open()


@pytest.fixture
def server_thread(tmp_path: Path) -> Iterator[int]:
    """A file server's thread."""
    program = tmp_path / "ganesha.nfsd"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "infinity"]) as process:
        # Popen returns when the kernel has closed its pipe in execve(2), which names it later.
        name = Path(f"/proc/{process.pid}/comm")
        until(lambda: name.read_text() == "ganesha.nfsd\n", "it has its name")
        yield process.pid
        process.kill()


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("others", [0, 1])
async def test_an_open_that_is_refused_in_that_wait_leaves_nothing(
    desk: CountedDesk,
    monkeypatch: pytest.MonkeyPatch,
    server_thread: int,
    others: int,
    *,
    served: bool,
) -> None:
    """Neither a handle, nor a writer; of a file server's neither."""
    ino = desk.identified(b"block")
    if served:
        request = Requester(0, 0, server_thread)
        monkeypatch.setattr(desk.files.request, "present", request)
    before = [desk.files.open(ino, os.O_WRONLY | os.O_APPEND)[0] for _ in range(others)]

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "the device")

    fh, _ = desk.files.open(ino, os.O_RDWR | os.O_APPEND)
    with monkeypatch.context() as failing:
        failing.setattr(desk.store.syscalls, "fsync", refuse)
        with pytest.raises(OSError, match="the device"):
            await desk.files.settle_rewrite(fh)
    with pytest.raises(BadHandle):
        desk.handles.get(fh)
    assert len(desk.handles) == others
    for opened in (desk.store.opened(ino) for _ in before):
        assert (opened.writers, opened.appenders) == (1, 1)
        assert opened.served_writers == served
    for handle in before:
        desk.close_file(handle)
    desk.assert_nothing_is_open()
    desk.store.sync()
    assert get(desk.store, ROOT_INODE, b"block") == b"bytes"
    assert desk.store.identity(ino) is not None


async def test_the_kernel_gets_a_rewrites_handle_after_that_wait(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the handler: what is written with the handle must not reach the device before."""
    order: list[str] = []
    ino = desk.identified(b"block")
    monkeypatch.setattr(desk.store.syscalls, "fsync", lambda _: order.append("fsync"))
    settings = desk.store.settings
    answers = Answers(
        desk.store.engine,
        desk.files,
        settings,
        Generations(0),
        lambda _: None,
    )
    operations = Operations(
        desk.store.engine,
        desk.files,
        answers,
        granted=lambda *_: order.append("granted"),
    )
    told = await operations.open(ino, os.O_RDWR, pyfuse3.RequestContext())
    assert order == ["fsync", "granted"]
    desk.close_file(told.fh)
    desk.assert_nothing_is_open()


@pytest.mark.parametrize(
    ("size_bytes", "calls"), [(3, ["fsync", "cut"]), (0, ["cut"]), (5, ["cut"]), (9000, ["cut"])]
)
@pytest.mark.parametrize("flags", [None, os.O_WRONLY | os.O_APPEND])
async def test_a_page_is_cut_when_the_device_forgot_that_all_of_it_is_whole(
    desk: CountedDesk,
    monkeypatch: pytest.MonkeyPatch,
    flags: int | None,
    size_bytes: int,
    calls: list[str],
) -> None:
    """By path, or by a descriptor that was opened for appending: neither had to wait before."""
    syscalls, order = desk.store.syscalls, []
    ino = desk.identified(b"block")
    fh = -1 if flags is None else desk.files.open(ino, flags)[0]
    cut = syscalls.ftruncate

    def note(fd: int, to_bytes: int) -> None:
        order.append("cut")
        cut(fd, to_bytes)

    monkeypatch.setattr(syscalls, "fsync", lambda _: order.append("fsync"))
    monkeypatch.setattr(syscalls, "ftruncate", note)
    await Changes(desk.files).change(ino, NewAttributes(size_bytes=size_bytes))
    assert order == calls
    assert desk.store.present(ino).size_bytes == size_bytes
    if fh >= 0:
        desk.close_file(fh)
    desk.assert_nothing_is_open()


async def test_a_sync_waits_for_all_that_was_published_before_it(desk: CountedDesk) -> None:
    """Slabs and blocks alike; and for no draft."""
    store = desk.store
    inos = []
    for name in (b"slab", b"block"):
        fh, ino = desk.create(name)
        if name == b"slab":
            allocate(store, desk.handles.get(fh).opened, 8192)
        assert await desk.transfers.write(fh, 0, b"x" * 8192) == 8192
        desk.close_file(fh)
        inos.append(ino)
    fh, draft = desk.create(b"draft")
    await desk.files.sync_names()
    assert [store.identity(ino) is not None for ino in (*inos, draft)] == [True, True, False]
    desk.close_file(fh)


def test_create_for_reading_publishes_at_once(desk: CountedDesk) -> None:
    """open(O_RDONLY | O_CREAT): an empty file that nobody writes."""
    fh, ino = desk.create(b"empty", os.O_RDONLY | os.O_CREAT)
    assert state_of(desk, ino) is State.LEASED
    assert desk.handles.get(fh).kind is HandleKind.READER
    desk.close_file(fh)
    desk.assert_nothing_is_open()


async def test_create_opens_what_is_there_unless_told_otherwise(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(flags: int) -> tuple[int, InodeNo]:
        fh, _, found, _ = await desk.files.open_or_create(ROOT_INODE, b"block", FILE, flags, 0, 0)
        return fh, found

    ino = desk.identified(b"block")
    with pytest.raises(Exists):
        await create(NEW | os.O_EXCL)
    synced: list[int] = []
    monkeypatch.setattr(desk.store.syscalls, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    fh, found = await create(NEW)
    assert found == ino
    extent = os.fstat(desk.handles.get(fh).opened.fd)
    assert synced == [extent.st_ino]  # the device forgot that it was whole
    desk.close_file(fh)
    # The kernel looks the name up again; for a thread it cannot tell the inode is fresh at once.
    with pytest.raises(DeadInode):
        await create(NEW | os.O_TRUNC)
    assert get(desk.store, ROOT_INODE, b"block") == b""
    desk.store.end_second_tries()  # who was refused never comes
    desk.assert_nothing_is_open()


@pytest.mark.parametrize("flags", [NEW, NEW | os.O_TRUNC, os.O_RDONLY | os.O_CREAT])
async def test_a_create_leaves_the_check_of_permissions_to_the_kernel(
    desk: CountedDesk, flags: int
) -> None:
    """Behind a CREATE it makes none: ESTALE, and it comes back by LOOKUP, its check and OPEN.

    That LOOKUP supersedes nothing for who may not write, and an OPEN that is refused then, too,
    leaves nothing behind that would hit the thread's next one.
    """
    store = desk.store
    desk.files.thread = lambda: 7
    ino = put(store, ROOT_INODE, b"block", b"bytes")
    store.change(ino, mode=0o600)
    with pytest.raises(DeadInode):
        await desk.files.open_or_create(ROOT_INODE, b"block", FILE, flags, 1000, 1000)
    assert store.looked_up(ino, 7, NOBODY) == ino
    if flags & os.O_TRUNC:
        with pytest.raises(DeadInode):
            desk.files.open(ino, flags)
    else:
        desk.close_file(desk.files.open(ino, flags)[0])
    assert not store.second_tries
    assert get(store, ROOT_INODE, b"block") == b"bytes"
    desk.assert_nothing_is_open()


async def test_who_may_write_by_a_group_of_his_empties_behind_a_create(desk: CountedDesk) -> None:
    """The second try of that CREATE found the old file, and there is no third: it was ESTALE."""
    store = desk.store
    desk.files.thread = lambda: 7
    ino = put(store, ROOT_INODE, b"block", b"bytes")
    store.change(ino, mode=0o620)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with pytest.raises(DeadInode):
        await desk.files.open_or_create(ROOT_INODE, b"block", FILE, flags, 1000, 1000)
    asked: list[bool] = []

    def may_empty(_record: InodeRecord, *, reads: bool) -> bool:
        asked.append(reads)
        return True

    fresh = store.looked_up(ino, 7, NOBODY, may_empty)
    assert (fresh != ino, asked) == (True, [False])
    desk.close_file(desk.files.open(fresh, flags)[0])
    assert get(store, ROOT_INODE, b"block") == b""
    desk.assert_nothing_is_open()


async def test_a_create_opens_no_directory(desk: CountedDesk) -> None:
    """The kernel finds out by itself what stands there."""
    desk.store.make_node(ROOT_INODE, b"d", stat.S_IFDIR | 0o777, 0, 0)
    with pytest.raises(DeadInode):
        await desk.files.open_or_create(ROOT_INODE, b"d", FILE, NEW, 0, 0)


@pytest.mark.parametrize("flags", [NEW, os.O_RDONLY | os.O_CREAT])
def test_a_create_that_cannot_be_recorded_leaves_nothing(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """Neither a writer that nobody closes nor an empty block that others would load."""
    monkeypatch.setattr(desk.handles, "open", fail)
    with pytest.raises(MemoryError):
        desk.create(b"block", flags)
    monkeypatch.undo()
    assert len(desk.store.open_inos) == 0
    assert inos(desk.store) == []


def test_an_emptying_open_that_cannot_be_recorded_leaves_no_empty_block(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name went to a draft that nobody has now: a miss."""
    ino = put(desk.store, ROOT_INODE, b"block", b"bytes")
    with pytest.raises(DeadInode):
        desk.files.open(ino, os.O_WRONLY | os.O_TRUNC)
    monkeypatch.setattr(desk.handles, "open", fail)
    fresh = desk.store.lookup(ROOT_INODE, b"block")
    with pytest.raises(MemoryError):
        desk.files.open(fresh, os.O_WRONLY | os.O_TRUNC)
    monkeypatch.undo()
    desk.assert_nothing_is_open()
    assert inos(desk.store) == []


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_an_open_that_fails_late_opens_nothing(
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch, flags: int
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
    desk: CountedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = put(desk.store, ROOT_INODE, b"block", b"bytes")
    fh, _ = desk.files.open(ino, os.O_RDONLY)
    monkeypatch.setattr(desk.handles, "open", fail)
    with pytest.raises(MemoryError):
        desk.files.open(ino, os.O_RDWR)
    monkeypatch.undo()
    assert desk.path.open == {ino}
    desk.close_file(fh)
    desk.assert_nothing_is_open()


async def test_a_handle_does_what_it_was_opened_for(desk: CountedDesk) -> None:
    ino = put(desk.store, ROOT_INODE, b"block", b"bytes")
    reader, _ = desk.files.open(ino, os.O_RDONLY)
    directory = desk.files.open_directory(ROOT_INODE)
    assert await desk.transfers.read(reader, 1, 100) == b"ytes"
    assert await desk.transfers.read(reader, 100, 100) == b""
    with pytest.raises(BadHandle):
        await desk.transfers.write(reader, 0, b"no")
    with pytest.raises(BadHandle):
        await desk.transfers.read(directory, 0, 1)
    for fh in (reader, directory):
        desk.close_file(fh)
        with pytest.raises(BadHandle):
            desk.close_file(fh)
    with pytest.raises(BadHandle):
        await desk.transfers.read(reader, 0, 1)


def test_what_is_no_file_is_not_opened(desk: CountedDesk) -> None:
    with pytest.raises(IsADirectory):
        desk.files.open(ROOT_INODE, os.O_RDONLY)
    with pytest.raises(DeadInode):
        desk.files.open(InodeNo(999_999), os.O_RDONLY)
    desk.assert_nothing_is_open()
