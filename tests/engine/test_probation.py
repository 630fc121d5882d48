"""New blocks that are in memory first: there until they prove worth a write, and gone with it."""

from collections.abc import Iterator

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.types import ROOT_INODE
from tests.support.clients.stepping import until
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.probation_host import (
    ROOM_BYTES,
    SIZE_BYTES,
    content,
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
    host,
    put,
    settle,
    tree,
)

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture(params=[(), (64 * MIB,)], ids=["one drive", "two"])
def pool(request: pytest.FixtureRequest) -> Iterator[Host]:
    with probation_host(request.param) as made:
        yield made


def test_a_block_of_a_known_size_is_in_memory_alone(pool: Host) -> None:
    inos = store_some(pool)
    for at, ino in enumerate(inos):
        assert pool.in_memory(ino).read_bytes() == content(at)
        assert pool.extent(ino) == pool.in_memory(ino)
    assert pool.store.memory_bytes == len(inos) * SIZE_BYTES
    assert tree(pool.store) == paths()
    assert_exact(pool)


def test_it_never_becomes_durable_by_itself(pool: Host) -> None:
    inos = store_some(pool)
    for _ in range(3):
        pool.store.tick()
        pool.store.drain()
    assert [pool.store.identity(ino) for ino in inos] == [None] * len(inos)
    pool.store.rename(ROOT_INODE, b"0", ROOT_INODE, b"renamed")
    pool.store.drain()
    assert pool.store.identity(inos[0]) is None


def test_a_loss_of_power_takes_what_is_in_memory_and_nothing_else(pool: Host) -> None:
    store_some(pool)
    settle(pool.store)
    pool.lose_power()
    store = pool.start()
    assert tree(store) == {b"/first": content(99)}
    settle(store)
    assert_exact(pool)
    assert_no_strays(store)


def test_a_loss_of_memory_after_a_logged_moment_is_misses(pool: Host) -> None:
    store_some(pool)
    settle(pool.store)
    pool.store.log_index()
    pool.kill()
    pool.pretend_reboot()
    store = pool.start()
    settle(store)
    assert tree(store) == {b"/first": content(99)}
    assert_exact(pool)


def test_the_next_server_finds_what_is_in_memory(pool: Host) -> None:
    inos = store_some(pool)
    store = pool.take_over()
    assert store.in_memory == set(inos)
    assert store.memory_bytes == len(inos) * SIZE_BYTES
    assert tree(store) == paths()
    settle(store)
    assert tree(store) == paths()
    store.move(*inos)
    assert tree(store) == paths()
    assert_exact(pool)


def test_a_start_after_a_kill_finds_it_even_if_there_is_no_more_room(pool: Host) -> None:
    inos = store_some(pool)
    pool.kill()
    pool.give_memory(0)
    store = pool.start()
    assert store.in_memory == set(inos)
    assert tree(store) == paths()
    while store.in_memory:  # it moves
        store.tick()
        store.drain()
    assert tree(store) == paths()
    new = put(store, ROOT_INODE, b"new", content(7))
    assert new not in store.in_memory


def test_a_stop_leaves_nothing_in_memory(pool: Host) -> None:
    inos = store_some(pool)
    pool.store.log_index()
    pool.stop()
    report = pool.check()
    assert not report.problems
    assert not [ino for ino in inos if pool.in_memory(ino).exists()]
    store = pool.start()
    assert set(tree(store)) <= set(paths())
    assert tree(store)[b"/first"] == content(99)
    assert_exact(pool)


def test_a_stop_moves_what_may_not_be_evicted(pool: Host) -> None:
    inos = store_some(pool)
    pool.store.set_xattr(inos[1], b"user.kvfs.pin", b"1")
    pool.stop()
    store = pool.start()
    assert tree(store)[b"/1"] == content(1)


def test_fsck_finds_what_a_killed_server_left_in_memory(pool: Host) -> None:
    store_some(pool)
    pool.kill()
    assert not pool.check().problems
    pool.check(repair=True)
    store = pool.start()
    assert tree(store) == paths()


def test_a_removed_block_leaves_memory(pool: Host) -> None:
    inos = store_some(pool)
    pool.store.unlink(ROOT_INODE, b"0")
    settle(pool.store)
    assert pool.store.in_memory == set(inos[1:])
    assert not pool.in_memory(inos[0]).exists()
    assert pool.store.memory_bytes == 3 * SIZE_BYTES
    assert_exact(pool)


def test_a_second_use_moves_a_block(pool: Host) -> None:
    inos = [publish(pool, b"%d" % at, content(at)) for at in range(4)]
    pool.store.tick_heat(pool.store.now_s() + 60)
    get(pool.store, ROOT_INODE, b"2")
    pool.store.tick()
    pool.store.drain()
    assert pool.store.in_memory == set(inos) - {inos[2]}


def test_what_came_first_goes_when_memory_is_full(pool: Host) -> None:
    count = 4 * ROOM_BYTES // SIZE_BYTES
    came = []
    for at in range(count):
        ino = publish(pool, b"%d" % at, content(at % 100))
        came += [ino] * (ino in pool.store.in_memory)
        pool.store.tick()
        pool.store.drain()
        assert pool.store.memory_bytes <= ROOM_BYTES
    assert len(came) == count
    held = len(pool.store.in_memory)
    # A rename that came in another burst of uses is a second use.
    stayed = [ino for ino in came if not pool.extent(ino).exists() or ino in pool.store.in_memory]
    assert pool.store.in_memory == set(stayed[-held:])
    assert len(stayed) == count - pool.store.moved
    assert held >= count // 4 // 2, "no more went than had to"
    assert_exact(pool)


def test_what_is_to_move_does_not_go_when_memory_is_full(pool: Host) -> None:
    """It is proven, however long it waits for its turn."""
    inos = [publish(pool, b"%d" % at, content(at)) for at in range(ROOM_BYTES // SIZE_BYTES)]
    assert pool.store.in_memory == set(inos)
    pool.store.order_move(inos[0])
    pool.store.tick()
    pool.store.drain()
    # A rename that came in another burst of uses is a second use: some may move beside it.
    assert [pool.store.has_row(ino) for ino in inos].count(False) == 2, "an eighth of the room"
    assert inos[0] not in pool.store.in_memory
    assert get(pool.store, ROOT_INODE, b"0") == content(0)
    assert_exact(pool)


def test_a_large_block_goes_to_its_drive(pool: Host) -> None:
    put(pool.store, ROOT_INODE, b"large", b"x" * ROOM_BYTES)
    put(pool.store, ROOT_INODE, b"large2", b"x" * ROOM_BYTES)
    third = put(pool.store, ROOT_INODE, b"large3", b"x" * ROOM_BYTES)
    assert third not in pool.store.in_memory


def test_leases_that_fill_memory_move_and_none_is_lost(pool: Host) -> None:
    count = 2 * ROOM_BYTES // SIZE_BYTES
    for at in range(count):
        put(pool.store, ROOT_INODE, b"%d" % at, content(at))
        pool.store.tick()
        pool.store.drain()
    assert tree(pool.store) == paths(count)


def test_scarce_memory_is_given_back_and_taken_again(pool: Host) -> None:
    for at in range(8):
        publish(pool, b"%d" % at, content(at))
    before = pool.store.memory_bytes
    pool.store.let_memory_be(0.5, seconds=1)
    assert pool.store.memory_bytes <= before // 2
    pool.store.let_memory_be(0.5, seconds=12)
    assert not pool.store.in_memory
    assert publish(pool, b"new", content(8)) not in pool.store.in_memory
    pool.store.let_memory_be(0.0, seconds=60)
    assert publish(pool, b"newer", content(9)) in pool.store.in_memory
    assert_exact(pool)


def test_a_drive_that_fails_takes_its_blocks_out_of_memory() -> None:
    guard = LoopGuard()
    with host(others_bytes=[64 * MIB]) as made:
        made.give_memory(ROOM_BYTES)
        store = made.start(guard)
        put(store, ROOT_INODE, b"first", content(99))
        inos = [publish(made, b"%d" % at, content(at)) for at in range(6)]
        lost = {ino for ino in store.in_memory if Numbering(2).drive(ino) == 1}
        kept = store.in_memory - lost
        assert lost
        assert kept
        with guard.failing("check_alive", below=made.drives[1]):
            until(lambda: drops_all(made), "all rows are gone")
            assert store.in_memory == kept
            assert store.memory_bytes == len(kept) * SIZE_BYTES
            assert not [ino for ino in lost if made.in_memory(ino).exists()]
            for at, ino in enumerate(inos):
                if ino in kept:
                    assert get(store, ROOT_INODE, b"%d" % at) == content(at)


def drops_all(pool: Host) -> bool:
    """Let a tick pass; return whether a drive has failed, and no row of it is left."""
    pool.store.tick()
    pool.store.run_all()
    return "failed" in pool.store.drive_states and pool.store.drives_going == 0
