"""What is not durable outlives a killed server, with its age: whoever waits for it, waits for it.

Each store here is killed on a real XFS, another one goes on as in a take-over, and then the power
is cut: what was waited for, or is older than the window, must be there.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.driven import Driven
from tests.support.store.outliving_memory import OutlivingMemory
from tests.support.store.stores import DIRECTORY, get, put, settle, tree

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

WINDOW_S: Final = 100.0
BLOCK: Final = b"block" * 5000


@pytest.fixture
def powered() -> Iterator[Drive]:
    """A drive with a running store, whose memory outlives it."""
    with drive() as made:
        made.settings = dataclasses.replace(made.settings, durable_within_s=WINDOW_S)
        made.memory = OutlivingMemory()
        made.start()
        yield made


def store_some(store: Driven, count: int, prefix: bytes = b"") -> dict[bytes, object]:
    """Publish *count* blocks; return what must be there."""
    for number in range(count):
        put(store, ROOT_INODE, b"tmp", BLOCK)
        store.rename(ROOT_INODE, b"tmp", ROOT_INODE, prefix + b"%d" % number)
    return {b"/" + prefix + b"%d" % number: BLOCK for number in range(count)}


def wait_for_all(store: Driven, *, sweeps: bool = False) -> None:
    """Do what an fsync does that the kernel sends again, or a client's first after the kill."""
    goal = store.goal()

    def reached() -> bool:
        if sweeps:
            store.tick()
        store.run_one()
        return store.reached(goal)

    until(reached, "all is durable")


def after_the_cut(powered: Drive) -> dict[bytes, object]:
    powered.cut(Cut.NOTHING)
    assert powered.memory is not None
    powered.memory.close()
    powered.memory = None
    store = powered.start()
    settle(store)
    return tree(store)


def test_who_waits_after_a_take_over_waits_for_what_was_stored_before(powered: Drive) -> None:
    stored = store_some(powered.store, 40)
    wait_for_all(powered.take_over())
    assert after_the_cut(powered) == stored


def test_it_outlives_many_servers(powered: Drive) -> None:
    stored: dict[bytes, object] = {}
    store = powered.store
    for prefix in (b"a", b"b", b"c"):
        stored |= store_some(store, 10, prefix)
        store = powered.take_over()
    wait_for_all(store)
    assert after_the_cut(powered) == stored


def test_a_batch_under_way_is_waited_for_again(powered: Drive) -> None:
    """Also those whose identity is written, and not flushed yet."""
    stored = store_some(powered.store, 40)
    goal = powered.store.goal()
    until(lambda: powered.store.reached(goal) or _identified(powered.store, 40), "identities")
    store = powered.take_over()
    wait_for_all(store)
    assert after_the_cut(powered) == stored


def _identified(store: Driven, count: int) -> bool:
    store.run_all()
    inos = (store.lookup(ROOT_INODE, b"%d" % number) for number in range(count))
    return any(store.identity(ino) is not None for ino in inos)


def test_names_and_attributes_that_waited_are_waited_for(powered: Drive) -> None:
    """A directory, a block that is durable under its former name, and a user xattr of another."""
    store = powered.store
    inos = [put(store, ROOT_INODE, name, BLOCK) for name in (b"K", b"A")]
    wait_for_all(store)
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    store.rename(ROOT_INODE, b"K", directory, b"L")
    store.set_xattr(inos[1], b"user.a", b"1")
    wait_for_all(powered.take_over())
    assert after_the_cut(powered) == {b"/dir": "directory", b"/dir/L": BLOCK, b"/A": BLOCK}
    store = powered.store
    assert get(store, store.lookup(ROOT_INODE, b"dir"), b"L") == BLOCK
    assert store.xattr(inos[1], b"user.a") == b"1"


def test_ages_go_on(powered: Drive) -> None:
    """No take-over makes the window begin anew, however many there are."""
    store, now_s = powered.store, powered.store.now_s()
    stored = store_some(store, 10)
    for taken_over in range(1, 5):
        store = powered.take_over()
        at_s = now_s + taken_over * WINDOW_S / 5
        store.turn_clock(lambda at_s=at_s: at_s)  # type: ignore[misc]
        told = store.describe()["durability"]
        assert told["blocks"] == 10
        assert told["oldest_s"] == pytest.approx(taken_over * WINDOW_S / 5, abs=2)
    # Due, and so it is taken at once: nobody asks for it.
    until(lambda: _ticked(store).describe()["durability"]["blocks"] == 0, "the pass has ended")
    assert store.describe()["durability"]["late"] == 0
    assert after_the_cut(powered) == stored


def test_what_is_late_counts_as_late_across_a_take_over(powered: Drive) -> None:
    now_s = powered.store.now_s()
    store_some(powered.store, 10)
    store = powered.take_over()
    store.turn_clock(lambda: now_s + 2 * WINDOW_S)
    until(lambda: _ticked(store).describe()["durability"]["blocks"] == 0, "the pass has ended")
    assert store.describe()["durability"]["late"] == 10


def test_attributes_that_wait_for_a_flush_keep_their_age(powered: Drive) -> None:
    store = powered.store
    ino = put(store, ROOT_INODE, b"K", BLOCK)
    wait_for_all(store)
    store.set_xattr(ino, b"user.a", b"1")
    store.hurry()
    store = powered.take_over()
    store.turn_clock(lambda: time.monotonic() + WINDOW_S * 0.8)
    assert store.describe()["durability"]["oldest_s"] == pytest.approx(WINDOW_S * 0.8, abs=2)
    until(lambda: _ticked(store).describe()["durability"]["attributes"] == 0, "it is flushed")
    after_the_cut(powered)
    assert powered.store.xattr(ino, b"user.a") == b"1"


def _ticked(store: Driven) -> Driven:
    store.tick()
    store.run_all()
    return store


@pytest.mark.parametrize("memory", ["none", "of another server"])
def test_without_that_memory_it_is_searched_for_first(powered: Drive, memory: str) -> None:
    """An older version leaves none, or one that it did not keep: it stored since."""
    assert powered.memory is not None
    stored: dict[bytes, object]
    if memory == "none":
        stored = store_some(powered.store, 40)
        powered.memory.empty("undurable")
    else:
        kept, powered.memory = powered.memory, OutlivingMemory()
        powered.take_over()
        stored = store_some(powered.store, 40)
        powered.memory.close()
        powered.memory = kept
    store = powered.take_over()
    goal = store.goal()
    for _ in range(100):
        assert not store.reached(goal), "it does not know yet what that is"
        store.run_one()
    until(lambda: _ticked(store).reached(goal), "all is durable")
    assert after_the_cut(powered) == stored


def test_what_a_full_list_left_out_is_waited_for_too(powered: Drive) -> None:
    powered.stop()
    powered.settings = dataclasses.replace(powered.settings, durable_queue_max=16)
    store = powered.start()
    stored = store_some(store, 100)
    for _ in range(2):
        assert not store.reached(store.goal())
        store = powered.take_over()
    wait_for_all(store, sweeps=True)
    assert after_the_cut(powered) == stored


def test_after_a_kill_without_a_take_over_it_is_searched_for_first(powered: Drive) -> None:
    """A mount of another supervisor, in the same boot."""
    stored = store_some(powered.store, 40)
    assert powered.memory is not None
    powered.memory.close()
    powered.memory = None
    powered.kill()
    store = powered.start()
    wait_for_all(store, sweeps=True)
    inos = [store.lookup(ROOT_INODE, path[1:]) for path in stored]
    assert all(store.identity(ino) is not None for ino in inos)


def test_a_block_that_is_gone_is_not_waited_for(powered: Drive) -> None:
    store = powered.store
    store_some(store, 3)
    store.unlink(ROOT_INODE, b"1")
    ino: InodeNo = store.lookup(ROOT_INODE, b"2")
    opened = store.open(ino, writer=True, truncate=False)
    store.close(opened, writer=True)
    store = powered.take_over()
    wait_for_all(store)
    assert store.listed() == 0
    assert after_the_cut(powered).keys() == {b"/0", b"/2"}
