"""An index that went back to its log, and files that say otherwise: which of two claims counts."""

from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.lifecycle import State
from kvfs.core.records import Identity
from kvfs.core.types import ROOT_INODE, InodeNo, Sequence
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.driven import Driven
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    allocate,
    assert_no_strays,
    put,
    settle,
    tree,
    write,
)

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

ONE: Final = b"one" * 2000
TWO: Final = b"two" * 3000
#: Higher than any that a server gives out here.
LATE: Final = Sequence(1000)


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.start()
        yield made


def after_a_cut(powered: Drive) -> Driven:
    """Lose power, and start again with what the log had."""
    powered.cut(Cut.NOTHING)
    return powered.start()


def comes_to(powered: Drive, expected: dict[bytes, object]) -> None:
    """All is settled, and is *expected*; nothing of it is wrong."""
    store = powered.store
    assert store.describe()["index_log"]["failures"] == 0
    settle(store)
    assert tree(store) == expected
    assert_no_strays(store)
    powered.stop()
    assert powered.problems() == []


@pytest.mark.parametrize("first_is_newer", [False, True])
@pytest.mark.parametrize("logged", [False, True])
def test_of_two_claims_to_one_name_the_newer_counts(
    powered: Drive, *, logged: bool, first_is_newer: bool
) -> None:
    """The older block is kept for a moment when it is replaced: its file says the name yet."""
    store = powered.store
    if not logged:
        store.sync()
        store.log_last()
    inos = [put(store, ROOT_INODE, name, data) for name, data in ((b"a", ONE), (b"b", TWO))]
    if logged:
        store.sync()
        store.log_last()
    older, newer = (b"b", b"a") if first_is_newer else (b"a", b"b")
    store.rename(ROOT_INODE, older, ROOT_INODE, b"K")
    store.sync()
    store.rename(ROOT_INODE, newer, ROOT_INODE, b"K")
    store.sync()
    assert store.identity(inos[first_is_newer]) is not None
    after_a_cut(powered)
    comes_to(powered, {b"/K": ONE if first_is_newer else TWO})


def test_blocks_that_changed_places_keep_their_bytes(powered: Drive) -> None:
    """Each claims the name that the index gives to the other."""
    store = powered.store
    for name, data in ((b"a", ONE), (b"b", TWO)):
        put(store, ROOT_INODE, name, data)
    store.sync()
    store.log_last()
    store.exchange(ROOT_INODE, b"a", ROOT_INODE, b"b")
    store.sync()
    after_a_cut(powered)
    comes_to(powered, {b"/a": TWO, b"/b": ONE})


def test_who_moved_away_is_not_lost_with_its_former_name(powered: Drive) -> None:
    store = powered.store
    put(store, ROOT_INODE, b"K", ONE)
    store.sync()
    store.log_last()
    store.rename(ROOT_INODE, b"K", ROOT_INODE, b"L")
    put(store, ROOT_INODE, b"K", TWO)
    store.sync()
    after_a_cut(powered)
    comes_to(powered, {b"/K": TWO, b"/L": ONE})


def test_a_record_and_a_file_of_one_sequence_that_disagree_are_a_miss(powered: Drive) -> None:
    store = powered.store
    ino = put(store, ROOT_INODE, b"K", ONE)
    put(store, ROOT_INODE, b"L", TWO)
    store.sync()
    store.log_last()
    store.identify_otherwise(ino, mtime_ns=1)
    store.sync()
    store = after_a_cut(powered)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"K")
    comes_to(powered, {b"/L": TWO})


def test_directories_that_moved_into_each_other_have_no_place_in_themselves(
    powered: Drive,
) -> None:
    """Of four renames the device has two: a into b, and b into a."""
    store = powered.store
    a, b = (store.make_node(ROOT_INODE, name, DIRECTORY, 0, 0)[0] for name in (b"a", b"b"))
    put(store, a, b"K", ONE)
    store.sync()
    store.log_last()
    for ino, parent, name in ((a, b, b"a"), (b, a, b"b")):
        store.identify_node(
            ino, Identity(ino, parent, LATE, DIRECTORY, 0, 0, 0, 0, State.NODE, 0, name)
        )
    store.sync()
    store = after_a_cut(powered)
    settle(store)
    found = tree(store)
    assert found in (
        {b"/a": "directory", b"/a/b": "directory", b"/a/K": ONE},
        {b"/b": "directory", b"/b/a": "directory", b"/b/a/K": ONE},
    )
    assert store.directory(ROOT_INODE).subdirs == 1


def test_young_blocks_behind_numbers_that_went_are_found(powered: Drive) -> None:
    store = powered.store
    store.sync()
    store.log_last()
    inos = [put(store, ROOT_INODE, b"%d" % number, ONE) for number in range(8)]
    for number in range(7):
        store.unlink(ROOT_INODE, b"%d" % number)
    store.erase_removed()
    settle(store)
    after_a_cut(powered)
    assert powered.store.lookup(ROOT_INODE, b"7") == inos[7]
    comes_to(powered, {b"/7": ONE})


def test_young_blocks_of_a_later_server_are_found(powered: Drive) -> None:
    """It logged nothing; its numbers begin a whole range behind those of the one before."""
    store = powered.store
    before = put(store, ROOT_INODE, b"K", ONE)
    store.sync()
    store.log_last()
    powered.kill()
    store = powered.start()
    store.log_no_more()
    after = put(store, ROOT_INODE, b"L", TWO)
    assert after - before > 1 << 14
    store.sync()
    after_a_cut(powered)
    comes_to(powered, {b"/K": ONE, b"/L": TWO})


def test_a_slab_that_was_opened_and_not_written_since_stays(powered: Drive) -> None:
    """Its identity went with the open; who asks for it meanwhile must not take that for damage."""
    store = powered.store
    opened, _ = store.create(ROOT_INODE, b"K", FILE, 0, 0)
    allocate(store, opened, len(ONE))
    write(store, opened, ONE)
    store.close(opened, writer=True)
    store.sync()
    store.log_last()
    store = after_a_cut(powered)
    ino = InodeNo(store.lookup(ROOT_INODE, b"K"))
    again = store.open(ino, writer=True, truncate=False)
    store.close(again, writer=True)
    assert store.identity(ino) is None
    assert store.prove(ino)
    comes_to(powered, {b"/K": ONE})
