"""Drafts that outgrow memory: they move to their drive while they are written, and lose nothing."""

import os
from collections.abc import Iterator

import pytest

from kvfs.core.errors import NoSpace, NotAtHand
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven import Opened
from tests.support.store.probation_host import (
    ROOM_BYTES,
    SIZE_BYTES,
    content,
    copies,
    probation_host,
)
from tests.support.store.stores import (
    FILE,
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    put,
    settle,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture(params=[(), (64 * MIB,)], ids=["one drive", "two"])
def pool(request: pytest.FixtureRequest) -> Iterator[Host]:
    with probation_host(request.param) as made:
        yield made


def begin(pool: Host) -> tuple[Opened, InodeNo]:
    """Begin a draft in memory that has what it was given."""
    opened, _ = pool.store.create(ROOT_INODE, b"grows", FILE, 0, 0)
    assert opened.ino in pool.store.in_memory
    grow(pool, opened, content(1), 0)
    assert opened.ino in pool.store.in_memory
    return opened, opened.ino


def grow(pool: Host, opened: Opened, data: bytes, at_bytes: int) -> None:
    """Write *data* as a mount does: what it lacks is brought first."""
    for _ in range(8):
        try:
            pool.store.require_memory(opened, at_bytes, len(data))
            break
        except NotAtHand as lack:
            lack.begin()()()
    write(pool.store, opened, data, at_bytes)


def test_a_draft_beyond_its_part_leaves_memory_and_is_whole(pool: Host) -> None:
    opened, ino = begin(pool)
    for at in range(1, ROOM_BYTES // SIZE_BYTES + 4):
        grow(pool, opened, content(at), at * SIZE_BYTES)
        assert pool.store.memory_bytes <= ROOM_BYTES
    assert ino not in pool.store.in_memory
    assert os.readlink(f"/proc/self/fd/{pool.store.extent_fd(opened)}") == str(pool.extent(ino))
    pool.store.close(opened, writer=True)
    blocks = range(1, ROOM_BYTES // SIZE_BYTES + 4)
    assert get(pool.store, ROOT_INODE, b"grows") == content(1) + b"".join(map(content, blocks))
    settle(pool.store)
    assert_exact(pool)
    assert_no_strays(pool.store)
    assert not pool.in_memory(ino).exists()


def test_a_draft_that_finds_room_stays(pool: Host) -> None:
    opened, ino = begin(pool)
    grow(pool, opened, content(2), SIZE_BYTES)
    assert ino in pool.store.in_memory
    assert pool.store.memory_bytes == 2 * SIZE_BYTES
    pool.store.tick()
    assert pool.store.memory_bytes == 2 * SIZE_BYTES
    pool.store.close(opened, writer=True)
    assert_exact(pool)


def test_many_drafts_that_grow_at_once_stay_within_the_room(pool: Host) -> None:
    drafts = []
    for at in range(ROOM_BYTES // SIZE_BYTES):
        opened, _ = pool.store.create(ROOT_INODE, b"%d" % at, FILE, 0, 0)
        drafts.append(opened)
    for at, opened in enumerate(drafts):
        grow(pool, opened, content(at) + content(at), 0)
        assert pool.store.memory_bytes <= ROOM_BYTES
    for opened in drafts:
        pool.store.close(opened, writer=True)
    for at in range(len(drafts)):
        assert get(pool.store, ROOT_INODE, b"%d" % at) == 2 * content(at)
    assert_exact(pool)


def lacking(pool: Host, opened: Opened) -> NotAtHand:
    """Return what *opened* lacks for a write that is too large for memory."""
    with pytest.raises(NotAtHand) as lack:
        pool.store.require_memory(opened, SIZE_BYTES, ROOM_BYTES)
    return lack.value


def test_a_write_under_way_is_waited_for(pool: Host) -> None:
    opened, ino = begin(pool)
    opened.begin_transfer()
    lacking(pool, opened).begin()()()
    assert ino in pool.store.in_memory, "the write may come after the copy"
    opened.end_transfer()
    lacking(pool, opened).begin()()()
    assert ino not in pool.store.in_memory
    pool.store.close(opened, writer=True)


def test_all_other_writes_wait_while_it_is_copied(pool: Host) -> None:
    opened, ino = begin(pool)
    copied = lacking(pool, opened).begin()()
    with pytest.raises(NotAtHand) as lack:
        pool.store.require_memory(opened, 0, 1)
    lack.value.begin()()()
    assert ino in pool.store.in_memory
    copied()
    pool.store.require_memory(opened, 0, 1)
    assert ino not in pool.store.in_memory
    pool.store.close(opened, writer=True)


def test_a_length_that_is_set_meanwhile_is_copied_again(pool: Host) -> None:
    opened, ino = begin(pool)
    copied = lacking(pool, opened).begin()()
    pool.store.truncate(ino, 5)
    copied()
    assert ino in pool.store.in_memory
    pool.store.drain()
    lacking(pool, opened).begin()()()
    assert ino not in pool.store.in_memory
    pool.store.close(opened, writer=True)
    assert get(pool.store, ROOT_INODE, b"grows") == content(1)[:5]
    assert_exact(pool)


@pytest.mark.parametrize("counts", [False, True])
def test_a_server_killed_meanwhile_leaves_no_stray(pool: Host, counts: bool) -> None:
    opened, ino = begin(pool)
    copied = lacking(pool, opened).begin()()
    if counts:
        copied()
    pool.kill()
    store = pool.start()
    settle(store)
    assert not pool.in_memory(ino).exists()
    assert_no_strays(store)
    assert_exact(pool)


def test_a_draft_that_is_removed_meanwhile_leaves_nothing(pool: Host) -> None:
    opened, ino = begin(pool)
    copied = lacking(pool, opened).begin()()
    pool.store.unlink(ROOT_INODE, b"grows")
    pool.store.close(opened, writer=True)
    copied()
    settle(pool.store)
    assert not pool.in_memory(ino).exists()
    assert_no_strays(pool.store)
    assert_exact(pool)


def test_a_draft_that_is_closed_meanwhile_is_copied_by_one(pool: Host) -> None:
    """Else the first to end would remove the copy that counts for the other."""
    opened, ino = begin(pool)
    copied = lacking(pool, opened).begin()()
    pool.store.close(opened, writer=True)
    pool.store.move(ino)
    assert ino in pool.store.in_memory, "its copy is not decided on"
    copied()
    pool.store.move(ino)
    assert ino not in pool.store.in_memory
    assert get(pool.store, ROOT_INODE, b"grows") == content(1)
    settle(pool.store)
    assert copies(pool, ino) == 1
    assert_exact(pool)
    assert_no_strays(pool.store)


def test_a_block_that_is_rewritten_in_memory_may_outgrow_it_too(pool: Host) -> None:
    ino = put(pool.store, ROOT_INODE, b"a", content(1))
    assert ino in pool.store.in_memory
    opened = pool.store.open(ino, writer=True, truncate=False)
    grow(pool, opened, b"x" * ROOM_BYTES, SIZE_BYTES)
    assert ino not in pool.store.in_memory
    pool.store.close(opened, writer=True)
    assert get(pool.store, ROOT_INODE, b"a") == content(1) + b"x" * ROOM_BYTES
    assert_exact(pool)


def test_what_the_kernel_reads_in_memory_grows_no_further_than_that_has_room(pool: Host) -> None:
    """A file server has it open, too, and writes after all: its writes come to the server."""
    ino = put(pool.store, ROOT_INODE, b"read", content(1))
    opened = pool.store.open(ino, writer=False, truncate=False)
    pool.store.let_writers_run()
    pool.store.require_memory(opened, 0, SIZE_BYTES)
    held_bytes = pool.store.memory_bytes
    with pytest.raises(NoSpace):
        pool.store.require_memory(opened, SIZE_BYTES, ROOM_BYTES)
    assert pool.store.memory_bytes == held_bytes
    pool.store.close(opened, writer=False)
