"""A block in memory that the kernel reads gets another inode, on its drive, for the next open."""

import os
from collections.abc import Iterator

import pytest

from kvfs.core.errors import DeadInode, NotAtHand
from kvfs.core.types import InodeNo
from tests.support.store.driven import Opened
from tests.support.store.probation_host import ROOM_BYTES, SIZE_BYTES, content
from tests.support.store.serving import Serving
from tests.support.store.stores import host

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture
def client() -> Iterator[Serving]:
    """Yield a client of a store with room in memory, which the kernel reads itself."""
    with host() as made:
        made.give_memory(ROOM_BYTES)
        serving = Serving(made)
        for _ in range(2):
            serving.tick()  # a range of inode numbers is there
        serving.put(b"first", content(99))
        serving.finish_jobs()
        serving.store.let_writers_run()
        yield serving


def put_in_memory(client: Serving, name: bytes, number: int) -> InodeNo:
    """Store a block; its writer asks for each byte, as it does in memory."""
    client.store.let_writers_run(free=False)
    ino = client.put(name, content(number))
    client.finish_jobs()
    client.store.let_writers_run()
    assert ino in client.store.in_memory
    return ino


def read_by_the_kernel(client: Serving, ino: InodeNo) -> tuple[Opened, int]:
    """Open *ino* to read it; also a descriptor of what the kernel has then."""
    opened = client.ask(lambda: client.store.open_to_read(ino))
    return opened, client.ask(lambda: client.store.extent_fd(opened))


def overwrite(client: Serving, name: bytes, data: bytes) -> InodeNo:
    """Write over the first bytes of *name*, as a program does: the kernel looks it up again."""
    opened = None
    while opened is None:
        ino = client.look_up(name)
        try:
            opened = client.open_to_write(ino)
        except DeadInode:
            assert client.look_up(name) != ino
    client.store.let_writers_run(free=False)
    client.write(opened, data)
    client.close(opened)
    return opened.ino


def let_time_pass(client: Serving, by_s: float) -> None:
    """Let *by_s* pass at once."""
    before = client.store.clock.tells
    client.store.turn_clock(lambda: before() + by_s)


def test_a_writer_beside_readers_gets_the_block_on_its_drive(client: Serving) -> None:
    """[life-rewrite] They keep the old bytes, and memory grows by none."""
    ino = put_in_memory(client, b"a", 1)
    opened, fd = read_by_the_kernel(client, ino)
    held_bytes = client.store.memory_bytes
    fresh = overwrite(client, b"a", b"new" + bytes(4 * SIZE_BYTES))
    assert fresh not in client.store.in_memory
    assert client.store.memory_bytes == held_bytes
    assert os.pread(fd, SIZE_BYTES, 0) == content(1)
    assert client.get(b"a") == b"new" + bytes(4 * SIZE_BYTES)
    client.close(opened, writer=False)
    client.tick_until(lambda: not client.store.in_memory, "memory is free")
    client.end()


def test_what_has_no_name_any_more_is_not_opened_to_write(client: Serving) -> None:
    ino = put_in_memory(client, b"a", 1)
    opened, _ = read_by_the_kernel(client, ino)
    client.unlink(b"a")
    with pytest.raises(DeadInode):
        client.open_to_write(ino)
    client.close(opened, writer=False)
    client.end()


def test_a_block_that_was_closed_meanwhile_is_written_where_it_is(client: Serving) -> None:
    """The copy is not needed then, and goes."""
    ino = put_in_memory(client, b"a", 1)
    opened, _ = read_by_the_kernel(client, ino)
    with pytest.raises(NotAtHand) as lack:
        client.store.open(ino, writer=True, truncate=False)
    waiting = client.bring(lack.value)
    client.close(opened, writer=False)
    client.wait_for(waiting)
    client.finish_jobs()
    assert overwrite(client, b"a", b"new") == ino
    assert client.get(b"a") == b"new" + content(1)[3:]
    client.end()


def test_what_is_read_for_long_gets_a_successor_that_is_like_it(client: Serving) -> None:
    """[probation] What was told of the block, its use, its attributes and times are its own."""
    ino = put_in_memory(client, b"a", 1)
    store = client.store
    client.ask(lambda: store.set_xattr(ino, b"user.tag", b"value"))
    opened, fd = read_by_the_kernel(client, ino)
    client.tick()
    before, heat = store.present(ino), store.heat()[ino]
    store.order_move(ino)
    client.tick()
    assert client.look_up(b"a") == ino, "most are closed soon"
    let_time_pass(client, 60)
    client.tick_until(lambda: client.look_up(b"a") != ino, "it has a successor")
    fresh = client.look_up(b"a")
    assert store.present(fresh) == before._replace(
        allocated_bytes=store.present(fresh).allocated_bytes
    )
    assert store.heat()[fresh][1:] == heat[1:]
    assert store.xattr_row(fresh, b"user.tag") == b"value"
    assert store.in_memory == {ino}
    assert os.pread(fd, SIZE_BYTES, 0) == client.get(b"a") == content(1)
    goal = client.ask(store.goal)
    client.tick_until(lambda: store.reached(goal), "all is durable")
    client.close(opened, writer=False)
    client.tick_until(lambda: not store.in_memory, "memory is free")
    client.end()
    client.host.lose_power()
    assert client.host.start().xattr_row(fresh, b"user.tag") == b"value"


def test_without_room_for_it_the_block_stays(client: Serving) -> None:
    """Nothing is evicted for a copy."""
    ino = put_in_memory(client, b"a", 1)
    opened, _ = read_by_the_kernel(client, ino)
    client.store.order_move(ino)
    let_time_pass(client, 60)
    space = client.store.space_of(ino)
    taken_bytes = space.unclaimed_bytes
    space.pledged_bytes += taken_bytes
    client.tick()
    assert client.look_up(b"a") == ino
    space.pledged_bytes -= taken_bytes
    client.tick_until(lambda: client.look_up(b"a") != ino, "it has a successor")
    client.close(opened, writer=False)
    client.end()


def test_a_server_that_is_killed_before_it_counts_leaves_the_block(client: Serving) -> None:
    ino = put_in_memory(client, b"a", 1)
    read_by_the_kernel(client, ino)
    with pytest.raises(NotAtHand) as lack:
        client.store.open(ino, writer=True, truncate=False)
    lack.value.begin()()  # what follows does not come
    client.stop_serving_now()
    client.host.kill()
    after = Serving(client.host)
    assert after.look_up(b"a") == ino
    assert after.get(b"a") == content(1)
    after.end()
