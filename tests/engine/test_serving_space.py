"""Space while a store serves: what the device frees and makes is counted, and comes in time."""

import os

import pytest

from kvfs.core import headroom
from kvfs.core.errors import NotAtHand
from kvfs.core.types import ROOT_INODE, round_up
from tests.support.store.driven import Opened
from tests.support.store.serving import Serving
from tests.support.store.stores import FILE, MIB, assert_exact, host

BLOCK = b"block" * 4000
RESERVE_BYTES = round_up(len(BLOCK))
PART_BYTES = 256 << 10


def create(client: Serving, name: bytes) -> Opened:
    """Create *name* at once. Raises NotAtHand."""
    return client.store.create(ROOT_INODE, name, FILE, 0, 0)[0]


# ---- ready extents ----


def test_creates_that_miss_in_a_burst_each_get_what_was_brought(client: Serving) -> None:
    for number in range(client.ready_of(0)):
        client.close(create(client, b"ready %d" % number))
    with client.guard.held("open"):
        waiting = []
        for number in range(6):
            with pytest.raises(NotAtHand) as lack:
                create(client, b"%d" % number)
            waiting.append(client.bring(lack.value))
    for each in waiting:
        client.wait_for(each)
    for number in range(6):
        client.close(create(client, b"%d" % number))
    assert len(client.end().tree) == 8


def test_what_was_brought_for_a_create_gives_way_to_nobody(client: Serving) -> None:
    client.put(b"K", BLOCK)
    opened = []
    while True:
        try:
            opened.append(create(client, b"%d" % len(opened)))
        except NotAtHand as lack:
            client.wait_for(client.bring(lack))
            break
    client.finish_jobs()
    client.let_ready_give_way()
    client.finish_jobs()
    assert client.ready_of(RESERVE_BYTES) == 1
    opened.append(create(client, b"last"))
    assert opened[-1].allocated_bytes == RESERVE_BYTES
    for each in opened:
        client.close(each)
    client.end()


def test_what_was_brought_and_not_asked_for_again_is_like_the_others(client: Serving) -> None:
    client.put(b"K", BLOCK)
    client.tick()
    opened = []
    for number in range(20):
        try:
            opened.append(create(client, b"%d" % number))
        except NotAtHand as lack:
            client.wait_for(client.bring(lack))
    for _ in range(3):
        client.tick()
    client.let_ready_give_way()
    client.finish_jobs()
    assert client.ready_of(RESERVE_BYTES) == 0
    for each in opened:
        client.close(each)
    client.end()


def test_a_create_that_gets_the_last_number_does_not_wait_for_more(client: Serving) -> None:
    opened = [create(client, b"%d" % number) for number in range(client.ready_of(0))]
    client.leave_numbers(1)
    client.close(client.create(b"K"))
    for each in opened:
        client.close(each)
    client.finish_jobs()
    assert client.guard.seen == []


def test_two_extents_without_a_reserve_are_always_ready(client: Serving) -> None:
    assert client.ready_of(0) == 2
    client.let_ready_give_way()
    client.finish_jobs()
    assert client.ready_of(0) == 2
    with client.guard.held("open", "fallocate"):
        opened = [create(client, b"a"), create(client, b"b")]
        with pytest.raises(NotAtHand):
            create(client, b"c")
    client.finish_jobs()
    assert client.ready_of(0) == 2, "others follow"
    for each in opened:
        client.close(each)
    client.end()


def test_they_give_way_when_no_more_requests_are_served(client: Serving) -> None:
    client.put(b"K", BLOCK)
    client.tick()
    client.stop_serving()
    client.let_ready_give_way()
    assert list(client.store.ready()) == []
    client.end()


# ---- what is unlinked ----


def test_an_extent_that_is_in_use_lingers_until_its_users_are_gone(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    user = os.open(client.host.extent(ino), os.O_RDONLY)
    client.unlink(b"K")
    client.store.erase_removed()
    client.finish_jobs()
    assert client.lingering == 1
    space = client.store.space
    assert (space.deleted_open_bytes, space.pending_delete_bytes) == (RESERVE_BYTES, 0)
    client.tick()
    assert client.host.extent(ino).exists()
    os.close(user)
    client.tick()
    client.tick()
    assert (client.lingering, client.store.space.deleted_open_bytes) == (0, 0)
    assert not client.host.extent(ino).exists()
    client.end()


def test_what_the_device_frees_is_counted_as_taken_until_it_is_free(client: Serving) -> None:
    client.put(b"K", BLOCK)
    client.finish_jobs()
    before = client.store.space.taken_bytes
    with client.guard.held("unlink"):
        client.unlink(b"K")
        client.store.erase_removed()
        client.store.unlink_now(64 * MIB)
        assert client.coming_bytes == RESERVE_BYTES
        assert client.store.space.taken_bytes == before
    client.finish_jobs()
    assert client.coming_bytes == 0
    assert client.store.space.taken_bytes == before - RESERVE_BYTES
    client.end()


# ---- eviction ----


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon each store comes says nothing: a slow machine's stores would have less kept free."""
    for counted in (headroom.Headroom, headroom._Rate):
        monkeypatch.setattr(counted, "_decay", lambda _, now_s: None)


def fill(client: Serving) -> None:
    """Fill the pool with blocks that may be evicted."""
    for number in range(64):
        client.put(b"%d" % number, b"x" * PART_BYTES)
        client.tick()
        if client.store.evicted_blocks:
            return
    raise AssertionError("the pool is not full")


def stored_in_a_full_pool(*, serves: bool) -> tuple[int, int]:
    """Store a block; return how many blocks there are then, and what they hold."""
    with host(capacity_bytes=8 * MIB) as made:
        client = Serving(made, serves=serves)
        fill(client)
        client.put(b"new", b"y" * MIB)
        assert client.get(b"new") == b"y" * MIB
        outcome = client.end()
        return len(outcome.tree), outcome.used_bytes


@pytest.mark.usefixtures("unhurried")
def test_a_store_in_a_full_pool_evicts_what_it_needs() -> None:
    assert stored_in_a_full_pool(serves=True) == stored_in_a_full_pool(serves=False)


def evicted_for(size_bytes: int, *, serves: bool) -> int:
    with host(capacity_bytes=8 * MIB) as made:
        client = Serving(made, serves=serves)
        fill(client)
        store, before = client.store, client.store.evicted_blocks
        if serves:
            with client.guard.held("unlink"):
                for _ in range(5):
                    with pytest.raises(NotAtHand):
                        store.require_space(size_bytes)
                evicted = store.evicted_blocks
                assert client.coming_bytes + store.space.unclaimed_bytes >= size_bytes
        client.ask(lambda: store.require_space(size_bytes))
        assert store.space.unclaimed_bytes >= size_bytes
        assert not serves or store.evicted_blocks == evicted
        assert_exact(made)
        client.stop_serving()
        return store.evicted_blocks - before


@pytest.mark.usefixtures("unhurried")
def test_no_more_is_evicted_than_is_missing_while_the_device_frees() -> None:
    evicted = evicted_for(MIB, serves=True)
    assert 0 < evicted == evicted_for(MIB, serves=False)


def test_a_request_takes_what_another_one_had_freed_only_once() -> None:
    with host(capacity_bytes=8 * MIB) as made:
        client = Serving(made)
        fill(client)
        opened = [client.create(b"a"), client.create(b"b")]
        for each in opened:
            client.write(each, b"x" * MIB)
        assert client.store.space.overcommitted_bytes == 0
        for each in opened:
            client.close(each)
        client.end()


OWN_USES = (
    "ExtentsAtHand gives each close to the device's thread, and until that comes to it the lease "
    "test takes the own descriptor for a user"
)


def test_a_look_at_a_block_is_no_use_of_it(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    with client.guard.held("close"):
        looks = [client.store.obstacle(ino) for _ in range(2)]
    client.finish_jobs()
    assert looks == [None, None]


def test_a_block_that_was_read_may_be_evicted_before_the_device_closes_it(
    client: Serving,
) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    reader = client.ask(lambda: store.open_to_read(ino))
    client.ask(lambda: store.extent_fd(reader))
    client.finish_jobs()
    with client.guard.held("close"):
        client.close(reader, writer=False)
        obstacle = store.obstacle(ino)
    client.finish_jobs()
    assert obstacle is None
