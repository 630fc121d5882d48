"""The end of a lease by time: what an NFS server leaves is whole, or its name goes."""

import errno
import os
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import NOBODY, SERVER, Maker
from kvfs.storage.background import Background
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import FILE, Host, allocate, assert_exact, get, host, settle, write

PAGE: Final = b"x" * 4096
#: No lease by time lasts so long.
LATER_S: Final = 1e9


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        yield made


def leave(running: Host, *pages: int, name: bytes = b"K", maker: Maker = SERVER) -> InodeNo:
    """Store a block of which *pages* are written, each of them alone; nobody renames it."""
    store = running.store
    opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0, maker)
    for page in pages:
        write(store, opened, PAGE, page * len(PAGE))
    store.close(opened, writer=True)
    return opened.ino


def end_leases(running: Host) -> None:
    """Let all leases by time end, and the thread look at what they leave."""
    store = running.store
    store.end_leases(LATER_S)
    settle(store)


def state(running: Host, name: bytes = b"K") -> State | None:
    """Return the state of what has *name*, None for a miss."""
    try:
        ino = running.store.lookup(ROOT_INODE, name)
    except NotFound:
        return None
    return State(running.store.record(ino).state)


def unproven(running: Host) -> int:
    return int(running.store.describe()["unverified_blocks"])


@pytest.mark.parametrize(
    ("pages", "becomes"),
    [((0, 1, 2), State.PUBLISHED), ((), State.PUBLISHED), ((2, 0, 1), State.PUBLISHED),
     ((0, 2), None), ((1, 2), None)],
    ids=["whole", "empty", "disordered", "holed", "without its head"],
)  # fmt: skip
def test_what_a_server_left_under_its_final_name_is_whole_or_goes(
    running: Host, pages: tuple[int, ...], becomes: State | None
) -> None:
    """[life-server] A client that died in the middle left a hole, if its writes had no order."""
    leave(running, *pages)
    assert state(running) is State.LEASED
    end_leases(running)
    assert state(running) is becomes
    assert unproven(running) == (becomes is None)
    assert_exact(running)


def test_what_is_reserved_and_was_not_written_is_a_hole(running: Host) -> None:
    """[life-server] A slab that a server leaves stays if all of it was written."""
    for name, size_bytes in ((b"full", 4096), (b"short", 3 * 4096)):
        store = running.store
        opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0, SERVER)
        allocate(store, opened, size_bytes)
        write(store, opened, PAGE)
        store.close(opened, writer=True)
        assert state(running, name) is State.SLAB
    end_leases(running)
    assert state(running, b"full") is State.ORPHAN_SLAB
    assert state(running, b"short") is None
    assert_exact(running)


def test_a_temporary_name_keeps_its_file(running: Host) -> None:
    """Its rename may follow; till then nobody reads it."""
    leave(running, 0, 2, name=b"K.tmp")
    end_leases(running)
    assert state(running, b"K.tmp") is State.ORPHAN


def test_a_process_leaves_holes_where_it_means_them(running: Host) -> None:
    """A truncate by path has no process that can be watched, and is no server's either."""
    leave(running, 0, 2, maker=NOBODY)
    end_leases(running)
    assert state(running) is State.PUBLISHED
    assert unproven(running) == 0


def test_a_reader_keeps_the_bytes_of_what_goes(running: Host) -> None:
    ino = leave(running, 0, 2)
    opened = running.store.open_to_read(ino)
    end_leases(running)
    assert state(running) is None
    fd = running.store.extent_fd(opened)
    assert os.pread(fd, 1 << 20, 0) == PAGE + bytes(4096) + PAGE
    running.store.close(opened, writer=False)
    assert_exact(running)


def test_what_is_written_again_meanwhile_is_left_alone(running: Host) -> None:
    """The answer of the look is about a block that is no more."""
    store = running.store
    ino = leave(running, 0, 2)
    store.end_leases(LATER_S)
    opened = store.open(ino, writer=True, truncate=False, maker=SERVER)
    settle(store)
    assert state(running) is State.REWRITE
    write(store, opened, PAGE, 4096)
    store.close(opened, writer=True)
    end_leases(running)
    assert state(running) is State.ORPHAN_SLAB
    assert get(store, ROOT_INODE, b"K") == PAGE * 3


@pytest.mark.usefixtures("caplog")
def test_what_cannot_be_looked_at_is_not_known_to_be_whole() -> None:
    with host() as made:
        calls = FailingSyscalls(["lseek", "ioctl"], 0, for_good=True)
        made.start(calls)
        leave(made, 0, 1)
        calls.fail_at = 1
        end_leases(made)
        assert calls.failed
        assert state(made) is None


@pytest.mark.usefixtures("caplog")
def test_without_a_descriptor_the_look_waits() -> None:
    """Nothing is wrong with the block."""
    with host() as made:
        calls = FailingSyscalls(["open"], 0, errno.EMFILE, for_good=True)
        made.start(calls)
        leave(made, 0, 1)
        calls.fail_at = 1
        end_leases(made)
        assert calls.failed
        assert state(made) is State.LEASED
        calls.fail_at = 0
        settle(made.store)
        assert state(made) is State.PUBLISHED


@pytest.mark.usefixtures("caplog")
def test_an_extent_that_is_gone_takes_the_name_along(running: Host) -> None:
    os.unlink(running.extent(leave(running, 0)))
    end_leases(running)
    assert state(running) is None


@pytest.mark.usefixtures("caplog")
def test_what_the_index_refuses_is_tried_again() -> None:
    with host() as made:
        calls = FailingSyscalls(["commit"], 0, errno.ENOSPC, for_good=True)
        made.start(calls)
        leave(made, 0, name=b"whole")
        leave(made, 1, name=b"holed")
        settle(made.store)
        calls.fail_at = 1
        end_leases(made)
        assert calls.failed
        assert (state(made, b"whole"), state(made, b"holed")) == (State.LEASED, State.LEASED)
        calls.fail_at = 0
        settle(made.store)
        settle(made.store)
        assert (state(made, b"whole"), state(made, b"holed")) == (State.PUBLISHED, None)


def test_thousands_of_leases_end_in_turn(running: Host) -> None:
    """No more are looked at at a time than the table of looks holds."""
    count = 700
    for number in range(count):
        leave(running, number % 2, name=b"%d" % number)
    store = running.store
    for _ in range(20):
        end_leases(running)
    assert store.describe()["blocks"] == count // 2
    assert unproven(running) == count // 2


def test_the_thread_has_so_many_to_look_at_and_no_more(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is looked at after the other; the rest wait where they cost nothing."""
    set_limit(monkeypatch, "leases that are looked at", 2)
    for name in (b"0", b"1", b"2", b"3", b"4"):
        leave(running, 0, name=name)
    settle(running.store)
    looks: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(Background, "submit_long", lambda _, job, *__: looks.append(job))
        running.store.end_leases(LATER_S)
    assert len(looks) == 2
