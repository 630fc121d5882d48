"""Blocks in memory of a store that serves: no move waits for the device on the loop."""

from collections.abc import Iterator

import pytest

from kvfs.core.errors import NotAtHand
from kvfs.core.types import InodeNo
from tests.support.store.probation_host import ROOM_BYTES, content
from tests.support.store.serving import Serving
from tests.support.store.stores import host


@pytest.fixture
def client() -> Iterator[Serving]:
    """Yield a client of a store with room in memory, which knows how large blocks are."""
    with host() as made:
        made.give_memory(ROOM_BYTES)
        serving = Serving(made)
        serving.tick()  # a range of inode numbers is there
        serving.tick()
        serving.put(b"first", content(99))
        serving.finish_jobs()
        yield serving


def put_in_memory(client: Serving, name: bytes, number: int) -> InodeNo:
    ino = client.put(name, content(number))
    assert ino in client.store.in_memory
    return ino


def assert_written_to_the_drive(client: Serving, ino: InodeNo) -> None:
    """What is written to block *a* now is there for good, and not in a file that has left."""
    client.guard.chill()
    opened = client.open_to_write(ino)
    client.write(opened, b"new")
    client.close(opened)
    for _ in range(2):
        client.tick()  # what was fetched is let go of
    assert client.get(b"a") == b"new" + content(1)[3:]
    client.end()


def test_blocks_move_while_requests_are_served(client: Serving) -> None:
    inos = [put_in_memory(client, b"%d" % at, at) for at in range(4)]
    assert [client.get(b"%d" % at) for at in range(4)] == [content(at) for at in range(4)]
    for ino in inos:
        client.store.order_move(ino)
    client.tick_until(lambda: not client.store.in_memory, "all have moved")
    assert client.store.moved == len(inos)
    assert [client.get(b"%d" % at) for at in range(4)] == [content(at) for at in range(4)]
    goal = client.ask(client.store.goal)
    client.tick_until(lambda: client.store.reached(goal), "all is durable")
    assert None not in client.in_thread(lambda: [client.store.identity(ino) for ino in inos])
    client.end()


def test_a_sync_waits_for_the_moves(client: Serving) -> None:
    inos = [put_in_memory(client, b"%d" % at, at) for at in range(4)]
    goal = client.ask(client.store.goal)
    client.tick_until(lambda: client.store.reached(goal), "all is durable")
    assert not client.store.in_memory
    assert None not in client.in_thread(lambda: [client.store.identity(ino) for ino in inos])
    client.end()


def test_what_was_fetched_before_a_move_is_not_written_after_it(client: Serving) -> None:
    ino = put_in_memory(client, b"a", 1)
    client.finish_jobs()
    client.store.order_move(ino)
    client.store.begin_moves()
    client.guard.chill()
    with pytest.raises(NotAtHand) as lack:
        client.store.open(ino, writer=True, truncate=False)
    fetched = lack.value.begin()()
    client.finish_jobs()  # the copy counts
    assert ino not in client.store.in_memory
    fetched()
    assert_written_to_the_drive(client, ino)


def test_what_is_kept_for_the_next_open_goes_with_a_move(client: Serving) -> None:
    ino = put_in_memory(client, b"a", 1)
    client.finish_jobs()
    client.store.order_move(ino)
    client.store.begin_moves()
    client.guard.chill()
    with pytest.raises(NotAtHand) as lack:
        client.store.open(ino, writer=True, truncate=False)
    lack.value.begin()()()  # it is kept, and the copy counts only now
    client.finish_jobs()
    assert ino not in client.store.in_memory
    assert_written_to_the_drive(client, ino)
