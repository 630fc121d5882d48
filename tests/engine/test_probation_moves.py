"""A block leaves memory for its drive: whole, under its number, and whoever uses it meanwhile."""

import errno
import os
from collections.abc import Iterator

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.probation_host import (
    content,
    copies,
    paths,
    probation_host,
    publish,
    store_some,
)
from tests.support.store.stores import (
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    settle,
    tree,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture(params=[(), (64 * MIB,)], ids=["one drive", "two"])
def pool(request: pytest.FixtureRequest) -> Iterator[Host]:
    with probation_host(request.param) as made:
        yield made


def test_a_move_keeps_number_name_size_and_times(pool: Host) -> None:
    inos = store_some(pool)
    before = [pool.store.present(ino) for ino in inos]
    statuses = [os.stat(pool.in_memory(ino)) for ino in inos]
    pool.store.move(*inos)
    assert not pool.store.in_memory
    assert pool.store.moved == len(inos)
    assert not any(pool.in_memory(ino).exists() for ino in inos)
    assert [pool.store.present(ino) for ino in inos] == before
    for ino, status in zip(inos, statuses, strict=True):
        now = os.stat(pool.extent(ino))
        assert (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert tree(pool.store) == paths()
    assert pool.store.memory_bytes == 0
    assert_exact(pool)
    settle(pool.store)
    assert_no_strays(pool.store)


def test_what_moved_becomes_durable(pool: Host) -> None:
    inos = store_some(pool)
    pool.store.move(*inos[:2])
    pool.store.sync()
    pool.lose_power()
    store = pool.start()
    assert tree(store) == {key: paths()[key] for key in (b"/first", b"/0", b"/1")}


def test_attributes_move_too(pool: Host) -> None:
    inos = store_some(pool)
    pool.store.set_xattr(inos[0], b"user.tag", b"value")
    pool.store.move(inos[0])
    settle(pool.store)
    pool.lose_power()
    assert pool.start().xattr_row(inos[0], b"user.tag") == b"value"


def test_a_copy_that_did_not_count_goes_at_the_next_start(pool: Host) -> None:
    inos = store_some(pool)
    pool.store.copy_only(inos[0])
    pool.kill()
    store = pool.start()
    assert inos[0] in store.in_memory
    assert copies(pool, inos[0]) == 1
    assert tree(store) == paths()


def test_a_server_killed_after_the_rename_leaves_the_block_on_its_drive(pool: Host) -> None:
    inos = store_some(pool)
    pool.store.copy_only(inos[0], counts=True)
    store = pool.take_over()
    assert inos[0] not in store.in_memory
    assert copies(pool, inos[0]) == 1
    assert tree(store) == paths()
    settle(store)
    pool.lose_power()
    assert tree(pool.start()) == {key: paths()[key] for key in (b"/first", b"/0")}


def test_a_block_that_is_always_open_moves_under_its_readers(pool: Host) -> None:
    ino = store_some(pool)[0]
    first = pool.store.open(ino, writer=False, truncate=False)
    reads, waits = (pool.store.extent_fd(first), pool.store.open(ino, writer=False, truncate=False))
    pool.store.move(ino)
    assert ino not in pool.store.in_memory
    assert not pool.in_memory(ino).exists()
    assert os.readlink(f"/proc/self/fd/{reads}") == str(pool.extent(ino))
    assert os.pread(reads, len(content(0)), 0) == content(0)
    for opened in (first, waits):
        pool.store.close(opened, writer=False)
    writer = pool.store.open(ino, writer=True, truncate=False)
    write(pool.store, writer, b"new")
    pool.store.close(writer, writer=True)
    assert get(pool.store, ROOT_INODE, b"0") == b"new" + content(0)[3:]
    assert_exact(pool)


def test_a_block_that_somebody_writes_stays_until_it_is_closed(pool: Host) -> None:
    ino = store_some(pool)[0]
    readers = [pool.store.open(ino, writer=False, truncate=False) for _ in range(2)]
    writer = pool.store.open(ino, writer=True, truncate=False)
    pool.store.move(ino)
    assert ino in pool.store.in_memory
    pool.store.close(writer, writer=True)
    pool.store.move(ino)
    assert ino not in pool.store.in_memory
    for opened in readers:
        pool.store.close(opened, writer=False)
    assert tree(pool.store) == paths()
    assert_exact(pool)


def test_a_block_that_the_kernel_has_open_moves_when_it_is_closed(pool: Host) -> None:
    ino = store_some(pool)[0]
    pool.store.let_writers_run()
    opened = pool.store.open(ino, writer=False, truncate=False)
    pool.store.move(ino)
    assert ino in pool.store.in_memory
    pool.store.close(opened, writer=False)
    pool.store.tick()
    pool.store.drain()
    assert ino not in pool.store.in_memory
    assert tree(pool.store) == paths()


def begin_move(pool: Host) -> InodeNo:
    """Copy a block; the copy does not count yet."""
    ino = publish(pool, b"a", content(1))
    pool.store.order_move(ino)
    pool.store.begin_moves()
    return ino


@pytest.mark.parametrize("closes", [False, True])
def test_what_is_written_during_the_copy_is_not_lost(pool: Host, closes: bool) -> None:
    ino = begin_move(pool)
    opened = pool.store.open(ino, writer=True, truncate=False)
    write(pool.store, opened, b"new")
    if closes:
        pool.store.close(opened, writer=True)
    pool.store.drain()
    assert ino in pool.store.in_memory
    assert pool.store.moves_undone == 1
    if not closes:
        write(pool.store, opened, b"newer")
        pool.store.close(opened, writer=True)
    pool.store.move(ino)
    assert ino not in pool.store.in_memory
    new = b"new" if closes else b"newer"
    assert get(pool.store, ROOT_INODE, b"a") == new + content(1)[len(new) :]
    assert copies(pool, ino) == 1
    assert_exact(pool)


def test_a_mapping_that_may_write_keeps_the_block_in_memory(pool: Host) -> None:
    ino = begin_move(pool)
    fd = os.open(pool.in_memory(ino), os.O_RDWR)  # as passthrough holds it for a client
    try:
        pool.store.drain()
        assert ino in pool.store.in_memory
        os.pwrite(fd, b"late", 0)
        pool.store.move(ino)
        assert ino in pool.store.in_memory, "it can be written still"
    finally:
        os.close(fd)
    pool.store.move(ino)
    assert ino not in pool.store.in_memory
    assert get(pool.store, ROOT_INODE, b"a")[:4] == b"late"


def test_a_block_that_was_removed_during_the_copy_is_gone(pool: Host) -> None:
    ino = begin_move(pool)
    pool.store.unlink(ROOT_INODE, b"a")
    settle(pool.store)
    assert copies(pool, ino) == 0
    assert_exact(pool)
    assert_no_strays(pool.store)


def test_a_drive_that_has_no_room_leaves_the_block_in_memory(pool: Host) -> None:
    ino = publish(pool, b"a", content(1))
    pool.store.syscalls.link = refuse_link
    pool.store.move(ino)
    assert ino in pool.store.in_memory
    assert get(pool.store, ROOT_INODE, b"a") == content(1)
    del pool.store.syscalls.link
    pool.store.move(ino)
    assert ino not in pool.store.in_memory
    assert get(pool.store, ROOT_INODE, b"a") == content(1)


def refuse_link(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_a_sync_moves_what_is_whole(pool: Host) -> None:
    store_some(pool)
    goal = pool.store.goal()
    for _ in range(100):
        if pool.store.reached(goal):
            break
        pool.store.tick()
        pool.store.drain()
    assert pool.store.reached(goal)
    pool.lose_power()
    assert tree(pool.start()) == paths()


def test_one_block_at_a_time_is_copied_to_a_drive(pool: Host) -> None:
    """The copies of several would take it from its clients together."""
    inos = store_some(pool, 8)
    store, numbering = pool.store, Numbering(len(pool.drives))
    same = [ino for ino in inos if numbering.drive(ino) == 0]
    assert len(same) >= 4
    store.move(*same)
    assert store.moved == len(same)
    assert store.describe()["background_failures"] == 0
    assert tree(store) == paths(8)


def test_a_block_that_goes_while_all_are_looked_at_disturbs_nobody(pool: Host) -> None:
    """The device's thread forgets a block whose file it has removed."""
    inos = store_some(pool)
    memory = pool.store.memory
    for ino in memory.inos(2):
        memory.forget(inos[-1])
        assert ino in inos[:2]
    assert memory.inos() == inos[:-1]
    memory.count(inos[-1], len(content(0)))
