"""A power loss costs no rebuild: the index goes back to what was logged, files say the rest."""

from collections.abc import Iterator

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.driven import Driven
from tests.support.store.stores import DIRECTORY, assert_no_strays, put, settle, tree

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.start()
        yield made


def moved(store: Driven, name: bytes, parent: InodeNo, new_name: bytes) -> None:
    store.rename(ROOT_INODE, name, parent, new_name)


def test_a_start_goes_back_to_what_was_logged_and_enters_what_came_later(powered: Drive) -> None:
    store = powered.store
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    for number in range(20):
        put(store, ROOT_INODE, b"old %d" % number, b"%d" % number * 3000)
    store.sync()
    store.log_last()
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
    store.log_last()
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
    store.log_last()
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
    store.log_last()
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
    store.log_last()
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
