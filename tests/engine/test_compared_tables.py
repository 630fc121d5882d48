"""After a power loss, what memory knows of blocks follows what the comparison with files changes.

Each case changes blocks that are logged, takes the power away, and lets the walk of the start
read the index before the comparison finds what is wrong in it. Then memory must know what it knows
after one more start, which reads the index as it is in the end.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pytest

from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.devices.power_cuts.power import Cut, Drive, drive
from tests.support.store.driven import Driven
from tests.support.store.stores import DIRECTORY, FILE, put, settle, tree, write

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

EVICT, PIN, KEY = b"user.kvfs.evict", b"user.kvfs.pin", b"user.key"
COUNT: Final = 200
USER, OTHER = 1000, 1001


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.start()
        yield made


class Known(NamedTuple):
    """What memory knows: ranks and leases of blocks, pins, and what is counted."""

    ranks: dict[InodeNo, Rank]
    held_bytes: list[int]
    leases: dict[InodeNo, State]
    pins: list[tuple[InodeNo, int]]
    pinned_bytes: int
    charged_bytes: list[int]
    recorded_bytes: int
    held_by: dict[str, dict[str, int]]


def known(store: Driven) -> Known:
    # A block that goes last or first may be at rest in one table, and a row at NEVER is none.
    ranks = {ino: row.rank for ino, row in store.heat().items() if row.rank is not Rank.NEVER}
    states = ((ino, store.lease_state(ino)) for ino in store.records())
    return Known(
        ranks,
        [store.held_bytes(rank) for rank in Rank if rank is not Rank.NEVER],
        {ino: state for ino, state in states if state is not None},
        sorted(store.pins()),
        store.pinned_bytes,
        [store.node_bytes(uid) for uid in (USER, OTHER)],
        store.space.recorded_bytes,
        store.held_by(),
    )


def make(store: Driven, name: bytes) -> InodeNo:
    return store.make_node(ROOT_INODE, name, DIRECTORY, 0, 0)[0]


def leave_never(store: Driven) -> Callable[[], None]:
    directory = make(store, b"kept")
    store.set_xattr(directory, EVICT, b"never")
    for number in range(COUNT):
        put(store, directory, b"%d.tmp" % number, b"x" * 5000)
        store.rename(directory, b"%d.tmp" % number, directory, b"%d" % number)

    def change() -> None:
        for number in range(COUNT):
            store.rename(directory, b"%d" % number, ROOT_INODE, b"%d" % number)

    return change


def enter_first(store: Driven) -> Callable[[], None]:
    directory = make(store, b"scratch")
    store.set_xattr(directory, EVICT, b"first")
    put(store, ROOT_INODE, b"block", b"x" * 5000)
    return lambda: moved(store, b"block", directory, b"block")


def leave_pinned(store: Driven) -> Callable[[], None]:
    directory = make(store, b"pinned")
    store.set_xattr(directory, PIN, b"1")
    put(store, directory, b"block", b"x" * 5000)
    return lambda: moved(store, b"block", ROOT_INODE, b"block", directory)


def moved(
    store: Driven, name: bytes, parent: InodeNo, to: bytes, above: InodeNo = ROOT_INODE
) -> None:
    store.rename(above, name, parent, to)


def publish_leased(store: Driven) -> Callable[[], None]:
    """Closed under one name, which is its maker's, and renamed by it later."""
    opened, _ = store.create(ROOT_INODE, b"a", FILE, 0, 0, maker=store.maker_of(1))
    write(store, opened, b"x" * 5000)
    store.close(opened, writer=True)
    assert store.lease_state(opened.ino) is State.LEASED
    return lambda: moved(store, b"a", ROOT_INODE, b"b")


def publish_slab(store: Driven) -> Callable[[], None]:
    ino = put(store, ROOT_INODE, b"a.tmp", b"x" * 5000)
    moved(store, b"a.tmp", ROOT_INODE, b"a")
    opened = store.open(ino, writer=True, truncate=False, maker=store.maker_of(1))
    write(store, opened, b"y" * 5000)
    store.close(opened, writer=True)
    assert store.lease_state(ino) is State.REWRITTEN
    return lambda: moved(store, b"a", ROOT_INODE, b"b")


def pin_and_unpin(store: Driven) -> Callable[[], None]:
    pinned, unpinned = (put(store, ROOT_INODE, name, b"x" * 5000) for name in (b"a", b"b"))
    store.set_xattr(unpinned, PIN, b"1")

    def change() -> None:
        store.set_xattr(pinned, PIN, b"1")
        store.remove_xattr(unpinned, PIN)

    return change


def hand_over(store: Driven) -> Callable[[], None]:
    ino = put(store, ROOT_INODE, b"a", b"x" * 5000)
    store.change(ino, uid=USER)
    store.set_xattr(ino, KEY, b"v" * 20, USER)

    def change() -> None:
        store.change(ino, uid=OTHER)
        store.set_xattr(ino, KEY, b"v" * 60, OTHER)

    return change


def replace(store: Driven) -> Callable[[], None]:
    """The block that had the name was pinned."""
    store.set_xattr(put(store, ROOT_INODE, b"a", b"x" * 5000), PIN, b"1")
    put(store, ROOT_INODE, b"b", b"y" * 9000)
    return lambda: moved(store, b"b", ROOT_INODE, b"a")


def lose(store: Driven) -> Callable[[], None]:
    lost = put(store, ROOT_INODE, b"a", b"x" * 5000)
    store.set_xattr(lost, PIN, b"1")
    return lambda: store.drop_identity(lost)


CASES: Final = (
    leave_never, enter_first, leave_pinned, publish_leased, publish_slab, pin_and_unpin, hand_over,
    replace, lose,
)  # fmt: skip


@pytest.mark.parametrize("prepare", CASES, ids=lambda case: case.__name__)
def test_memory_follows_what_the_comparison_changes(
    powered: Drive, prepare: Callable[[Driven], Callable[[], None]]
) -> None:
    store = powered.store
    change = prepare(store)
    settle(store)
    store.log_last()
    change()
    settle(store)
    expected, before = tree(store), known(store)
    powered.cut(Cut.NOTHING)

    store = powered.start()
    store.run_all()
    assert store.scanned
    settle(store)
    found = store.describe()["reconcile"]
    assert found["moved"] + found["dropped"], "nothing was wrong in the index"
    seen = known(store)
    if prepare is not lose:
        assert tree(store) == expected
        # A directory's pin counts what it held when it was set, or at the start.
        assert seen._replace(pins=before.pins, pinned_bytes=before.pinned_bytes) == before
    powered.stop()
    store = powered.start()
    settle(store)
    assert store.scanned
    assert seen == known(store)
    powered.stop()
    assert powered.problems() == []


def test_blocks_that_left_what_is_kept_may_be_evicted_at_once(powered: Drive) -> None:
    """Some stayed "kept" until a restart: the walk had seen them before they were moved."""
    store = powered.store
    change = leave_never(store)
    settle(store)
    store.log_last()
    change()
    settle(store)
    powered.cut(Cut.NOTHING)

    store = powered.start()
    store.run_all()
    settle(store)
    assert store.describe()["reconcile"]["moved"] == COUNT
    assert store.held_bytes(Rank.KEPT) == 0
    assert store.evictable_bytes == store.space.recorded_bytes > 0
    while store.evictable_bytes:
        assert store.evict(store.evictable_bytes) > 0
    assert tree(store) == {b"/kept": "directory"}
