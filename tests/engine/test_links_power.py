"""After a power loss a block has one name: the one that it was linked to."""

from collections.abc import Iterator

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.inode_rules import alias_of
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.driven import Driven
from tests.support.store.stores import DIRECTORY, FILE, assert_no_strays, settle, tree, write

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]
BYTES = b"bytes" * 2000


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.start()
        yield made


def linked(store: Driven, name: bytes, parent: InodeNo = ROOT_INODE) -> InodeNo:
    """Store a block as *name* in *parent*; the name that it was created with stays."""
    opened, _ = store.create(ROOT_INODE, name + b".tmp", FILE, 0, 0)
    write(store, opened, BYTES)
    store.close(opened, writer=True, awaits_rename=True)
    store.link(opened.ino, parent, name)
    return opened.ino


def is_sound(powered: Drive, expected: dict[bytes, object]) -> None:
    store = powered.store
    settle(store)
    assert tree(store) == expected
    assert_no_strays(store)
    powered.stop()
    assert powered.problems() == []


@pytest.mark.parametrize("logged", ["before", "after"])
@pytest.mark.parametrize("looks", ["at the name", "at the list", "not"])
def test_the_first_name_does_not_outlive_it(powered: Drive, logged: str, looks: str) -> None:
    """[hard-links] Whether the index is older than the link, or has both names."""
    store = powered.store
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    store.sync()
    if logged == "before":
        store.log_last()
    inos = [linked(store, b"K"), linked(store, b"L", directory)]
    settle(store)
    store.sync()
    if logged == "after":
        store.log_last()
    powered.cut(Cut.NOTHING)

    store = powered.start()
    assert store.describe()["reconcile"]["share"] <= 1.0, "it was rebuilt instead"
    if looks == "at the name":
        for name in (b"K.tmp", b"L.tmp"):
            with pytest.raises(NotFound):
                store.lookup(ROOT_INODE, name)
    elif looks == "at the list":
        names = [name for _, name in store.children(ROOT_INODE, InodeNo(0))]
        assert sorted(names) == [b"K", b"dir"]
    settle(store)
    assert not any(alias_of(store.record(ino)) for ino in inos)
    is_sound(powered, {b"/K": BYTES, b"/dir": "directory", b"/dir/L": BYTES})


def test_what_is_linked_after_it_has_both_names(powered: Drive) -> None:
    """While the index is compared with the files, what is new is in no doubt."""
    store = powered.store
    linked(store, b"K")
    settle(store)
    store.sync()
    store.log_last()
    powered.cut(Cut.NOTHING)

    store = powered.start()
    linked(store, b"L")
    for name in (b"L", b"L.tmp", b"K"):
        store.lookup(ROOT_INODE, name)
    is_sound(powered, {b"/K": BYTES, b"/L": BYTES, b"/L.tmp": BYTES})


def test_another_block_may_take_the_first_name_before_it(powered: Drive) -> None:
    store = powered.store
    linked(store, b"K")
    settle(store)
    store.sync()
    store.log_last()
    other, _ = store.create(ROOT_INODE, b"new", FILE, 0, 0)
    write(store, other, b"new")
    store.close(other, writer=True)
    store.rename(ROOT_INODE, b"new", ROOT_INODE, b"K.tmp")
    settle(store)
    store.sync()
    powered.cut(Cut.NOTHING)

    powered.start()
    is_sound(powered, {b"/K": BYTES, b"/K.tmp": b"new"})


def test_a_block_that_took_back_its_first_name_has_it(powered: Drive) -> None:
    store = powered.store
    linked(store, b"K")
    settle(store)
    store.sync()
    store.log_last()
    store.unlink(ROOT_INODE, b"K")
    settle(store)
    store.sync()
    powered.cut(Cut.NOTHING)

    powered.start()
    is_sound(powered, {b"/K.tmp": BYTES})
