"""A power loss costs no rebuild: the index goes back to its checkpoint, and files say the rest."""

import dataclasses
from collections.abc import Iterator

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.driven import Driven
from tests.support.store.stores import DIRECTORY, MIB, assert_no_strays, put, settle, tree

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

#: Blocks that are stored and removed again.
COME_AND_GO = 4000


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.start()
        yield made


def checkpoint(store: Driven) -> None:
    """Tick until a checkpoint that was begun from now on is complete."""
    before = store.describe()["checkpoint"]["taken"]
    store.checkpoint_due()

    def is_taken() -> bool:
        store.tick()
        return bool(store.describe()["checkpoint"]["taken"] > before)

    until(is_taken, "a checkpoint")


def moved(store: Driven, name: bytes, parent: InodeNo, new_name: bytes) -> None:
    store.rename(ROOT_INODE, name, parent, new_name)


def test_a_start_goes_back_to_the_checkpoint_and_enters_what_came_later(powered: Drive) -> None:
    store = powered.store
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    for number in range(20):
        put(store, ROOT_INODE, b"old %d" % number, b"%d" % number * 3000)
    store.sync()
    checkpoint(store)
    put(store, directory, b"young", b"y" * 5000)
    moved(store, b"old 1", directory, b"moved")
    store.unlink(ROOT_INODE, b"old 2")
    put(store, ROOT_INODE, b"fresh", b"f" * 100)
    store.rename(ROOT_INODE, b"fresh", ROOT_INODE, b"old 3")  # over an older block
    settle(store)
    expected = tree(store)
    store.sync()
    put(store, ROOT_INODE, b"torn", b"t" * 5000)  # never reaches the device
    powered.cut(Cut.NOTHING)

    store = powered.start()
    assert store.describe()["reconcile"]["entered"] > 0, "it was rebuilt instead"
    assert tree(store).items() <= expected.items()
    settle(store)
    assert tree(store) == expected
    assert store.describe()["reconcile"]["share"] == 1.0
    assert_no_strays(store)
    powered.stop()
    assert powered.problems() == []


def test_a_directory_that_was_renamed_later_keeps_the_count_of_its_names(powered: Drive) -> None:
    """It was 0, and the removal of a name below it failed."""
    store = powered.store
    directory, _ = store.make_node(ROOT_INODE, b"one", DIRECTORY, 0, 0)
    for name in (b"a", b"b"):
        put(store, directory, name, name * 3000)
    store.sync()
    checkpoint(store)
    store.rename(ROOT_INODE, b"one", ROOT_INODE, b"two")
    store.sync()
    powered.cut(Cut.NOTHING)

    store = powered.start()
    assert store.directory(directory).entries == 2
    store.unlink(directory, b"a")
    settle(store)
    assert set(tree(store)) == {b"/two", b"/two/b"}
    powered.stop()
    assert powered.problems() == []


def test_what_a_file_does_not_confirm_is_a_miss_at_once(powered: Drive) -> None:
    store = powered.store
    ino = put(store, ROOT_INODE, b"kept", b"k" * 5000)
    lost = put(store, ROOT_INODE, b"lost", b"l" * 5000)
    store.sync()
    checkpoint(store)
    store.drop_identity(lost)
    store.sync()
    powered.cut(Cut.NOTHING)

    store = powered.start()
    assert store.lookup(ROOT_INODE, b"kept") == ino
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"lost")
    settle(store)
    powered.stop()
    assert powered.problems() == []


def test_what_was_removed_since_it_was_found_is_not_entered_again(powered: Drive) -> None:
    """Its file is there yet: the thread that removes it has its turn later."""
    store = powered.store
    inos = [put(store, ROOT_INODE, b"%d" % number, b"k" * 5000) for number in range(8)]
    store.sync()
    checkpoint(store)
    powered.cut(Cut.NOTHING)

    store = powered.start()
    for number, ino in enumerate(inos):
        store.unlink(ROOT_INODE, b"%d" % number)
        assert store.prove(ino)
    assert tree(store) == {}
    settle(store)
    assert tree(store) == {}
    powered.stop()
    assert powered.problems() == []


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_comparison_that_was_cut_short_goes_on(powered: Drive, end: str) -> None:
    store = powered.store
    for number in range(30):
        put(store, ROOT_INODE, b"%d" % number, b"%d" % number * 3000)
    store.sync()
    checkpoint(store)
    gone = store.lookup(ROOT_INODE, b"7")
    store.drop_identity(gone)
    store.sync()
    powered.cut(Cut.NOTHING)

    powered.start()  # nothing ticks
    powered.stop() if end == "stop" else powered.kill()
    store = powered.start()
    assert store.describe()["reconcile"]["share"] < 1.0
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"7")
    settle(store)
    assert store.describe()["reconcile"]["share"] == 1.0
    assert len(tree(store)) == 29
    powered.stop()
    assert powered.problems() == []


def test_a_checkpoint_that_is_not_whole_is_not_believed(powered: Drive) -> None:
    store = powered.store
    put(store, ROOT_INODE, b"kept", b"k" * 5000)
    store.sync()
    checkpoint(store)
    store.overwrite_file("CHECKPOINT", 60, b"\xff")
    expected = tree(store)
    powered.cut(Cut.LOG_ONLY)
    store = powered.start()
    assert store.describe()["reconcile"]["entered"] == 0
    assert tree(store) == expected


def start_small(powered: Drive) -> Driven:
    """Start a small pool with a checkpoint; time alone makes no other one due."""
    powered.stop()
    # As far ahead as in a pool of that size: without room there is no checkpoint at all.
    powered.settings = dataclasses.replace(powered.settings, index_preallocate_bytes=16 * MIB)
    store = powered.start()
    put(store, ROOT_INODE, b"first", b"x")
    store.sync()
    checkpoint(store)
    store.checkpoint_never_due()
    return store


def test_the_index_of_a_small_pool_grows_little_between_two(powered: Drive) -> None:
    """It never shrinks, and what it takes is lost for blocks."""
    store = start_small(powered)
    found = store.describe()
    part_bytes = found["capacity_bytes"] // 64
    stores_max = part_bytes // 4096  # a commit writes several pages
    for number in range(stores_max):
        put(store, ROOT_INODE, b"block %d" % number, b"x")
        store.sync()
        store.tick()
        if store.describe()["checkpoint"]["taken"] > found["checkpoint"]["taken"]:
            break
    else:
        pytest.fail(f"no checkpoint in {stores_max} stores")


def test_the_index_of_a_small_pool_stays_small_while_blocks_come_and_go(powered: Drive) -> None:
    """A page that is freed is not used again before the next checkpoint is complete."""
    store = start_small(powered)
    before_bytes = store.index_file_bytes()
    part_bytes = max(4 * MIB, store.describe()["capacity_bytes"] // 64)
    for number in range(COME_AND_GO):
        put(store, ROOT_INODE, b"%d" % number, b"x")
        store.unlink(ROOT_INODE, b"%d" % number)
        store.sync()
        store.tick()
    freed_bytes = COME_AND_GO * 2 * 4096
    assert freed_bytes > 6 * part_bytes, "too few to show it"
    assert store.index_file_bytes() - before_bytes < 4 * part_bytes
