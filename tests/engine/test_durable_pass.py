"""Only what is durable has an identity, and after a power loss only that comes back: whole."""

import dataclasses
import os
from collections.abc import Callable, Iterator

import pytest

from kvfs.core.changed import Reason
from kvfs.core.lifecycle import State
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.devices.power_cuts.power import Cut, Drive, drive, write_back
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import DIRECTORY, FILE, allocate, get, put, settle, tree, write

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

#: LMCache's header, and the payload that it writes with a second call: they share a page.
HEADER = b"h" * 28
PAYLOAD = b"p" * 20_000
WINDOW_S = 0.5


@pytest.fixture
def powered() -> Iterator[Drive]:
    with drive() as made:
        made.settings = dataclasses.replace(made.settings, durable_within_s=WINDOW_S)
        made.start()
        yield made


def tick_until(store: Driven, holds: Callable[[], bool], what: str) -> None:
    def ticked() -> bool:
        store.tick()
        store.run_all()
        return holds()

    until(ticked, what)


def pass_over(store: Driven) -> None:
    """Let the pass make all durable that may be."""
    tick_until(
        store,
        lambda: store.listed() == store.describe()["durability"]["held_blocks"],
        "all is durable that is final",
    )


def cut_and_see(powered: Drive, cut: Cut = Cut.NOTHING) -> dict[bytes, object]:
    powered.cut(cut)
    store = powered.start()
    settle(store)
    return tree(store)


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_what_the_pass_made_durable_comes_back_and_the_rest_does_not(
    powered: Drive, cut: Cut
) -> None:
    store = powered.store
    stored = {b"/%d" % number: b"%d" % number * 5000 for number in range(40)}
    for path, data in stored.items():
        put(store, ROOT_INODE, b"tmp", data)
        store.rename(ROOT_INODE, b"tmp", ROOT_INODE, path[1:])
    pass_over(store)
    figures = store.describe()["durability"]
    assert (figures["blocks"], figures["bytes"], figures["oldest_s"]) == (0, 0, 0.0)
    assert figures["marked"] == len(stored)
    put(store, ROOT_INODE, b"late", b"late" * 5000)
    assert store.describe()["durability"]["blocks"] == 1
    assert cut_and_see(powered, cut) == stored


def test_one_flush_serves_many_blocks(powered: Drive) -> None:
    store = powered.store
    before = store.describe()["durability"]["flushes"]
    for number in range(100):
        put(store, ROOT_INODE, b"%d" % number, b"x" * 5000)
    goal = store.goal()
    tick_until(store, lambda: store.reached(goal), "they are durable")
    assert store.describe()["durability"]["flushes"] - before <= 3
    assert len(cut_and_see(powered)) == 100


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_a_page_that_was_written_back_twice_is_no_block(powered: Drive, cut: Cut) -> None:
    """Header and payload share it: the device has it with the header alone, at full size."""
    store = powered.store
    opened, _ = store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0)
    write(store, opened, HEADER)
    os.fsync(opened.fd)
    write(store, opened, PAYLOAD, len(HEADER))
    write_back(opened.fd, PAGE_BYTES, len(PAYLOAD))
    store.close(opened, writer=True)
    store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K")
    store.hurry()
    assert cut_and_see(powered, cut) == {}


def test_a_block_that_is_mapped_to_be_written_is_not_durable(powered: Drive) -> None:
    store = powered.store
    ino = put(store, ROOT_INODE, b"K", b"old" * 5000)
    mapping = store.open_extent(ino, os.O_RDWR)
    pass_over(store)
    assert store.describe()["durability"]["held_blocks"] == 1
    assert store.identity(ino) is None
    os.pwrite(mapping, b"new", 0)
    os.close(mapping)
    tick_until(store, lambda: not store.listed(), "its bytes are final")
    assert cut_and_see(powered) == {b"/K": b"new" + (b"old" * 5000)[3:]}


def open_to_change(store: Driven, ino: InodeNo) -> int:
    opened = store.open(ino, writer=True, truncate=False)
    assert store.must_forget(opened)
    store.forget_durably(opened)
    return opened.fd


def open_to_append(store: Driven, ino: InodeNo) -> int:
    """O_APPEND does not bind: fcntl(2) clears it, and a mapping does not know it."""
    opened = store.open(ino, writer=True, truncate=False, appends=True)
    assert store.must_forget(opened)
    store.forget_durably(opened)
    return opened.fd


@pytest.mark.parametrize("opens", [open_to_change, open_to_append])
@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_a_durable_block_that_is_opened_to_be_written_is_called_whole_no_more(
    powered: Drive, cut: Cut, opens: Callable[[Driven, InodeNo], int]
) -> None:
    store = powered.store
    ino = put(store, ROOT_INODE, b"K", b"old" * 5000)
    pass_over(store)
    fd = opens(store, ino)
    os.pwrite(fd, b"new", 0)
    write_back(fd, 0, PAGE_BYTES)
    pass_over(store)
    assert cut_and_see(powered, cut) == {}


def test_what_was_taken_is_not_marked_if_it_is_opened_meanwhile(powered: Drive) -> None:
    store = powered.store
    ino = put(store, ROOT_INODE, b"K", b"old" * 5000)
    goal = store.goal()
    store.reached(goal)  # it is taken
    store.run_all()
    opened = store.open(ino, writer=True, truncate=False)
    write(store, opened, b"new")
    tick_until(store, lambda: store.reached(goal), "the batch has ended")
    assert store.identity(ino) is None
    store.close(opened, writer=True)
    pass_over(store)
    assert cut_and_see(powered) == {b"/K": b"new" + (b"old" * 5000)[3:]}


def test_what_the_pass_has_open_may_be_evicted_unless_somebody_else_uses_it(
    powered: Drive,
) -> None:
    store = powered.store
    free, used = (put(store, ROOT_INODE, name, b"x" * 5000) for name in (b"a.tmp", b"b.tmp"))
    for name in (b"a", b"b"):
        store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name)
    reader = store.open_extent(used, os.O_RDONLY)
    store.reached(store.goal())
    store.run_all()
    assert (store.obstacle(free), store.obstacle(used)) == (None, "mapped")
    pass_over(store)
    assert (store.obstacle(free), store.obstacle(used)) == (None, "mapped")
    os.close(reader)
    assert store.obstacle(used) is None


def test_what_the_pass_has_open_goes_by_command_and_not_for_a_writer(powered: Drive) -> None:
    """Its space is free a moment later, which is too late for a writer that waits."""
    store = powered.store
    ino = put(store, ROOT_INODE, b"a.tmp", b"x" * 5000)
    store.rename(ROOT_INODE, b"a.tmp", ROOT_INODE, b"a")
    fd = store.open_final(ino)
    store.evict(1)
    assert store.evicted_blocks == 0
    assert store.evict_by_command([ino], open_too=False, reason=Reason.COMMAND)[0] == 1
    store.close_final(ino, fd)


def rewritten(store: Driven) -> InodeNo:
    ino = put(store, ROOT_INODE, b"K", b"old" * 5000)
    opened = store.open(ino, writer=True, truncate=False)
    write(store, opened, b"new")
    store.close(opened, writer=True)
    assert store.record(ino).state == State.REWRITTEN
    return ino


def slab(store: Driven) -> InodeNo:
    opened, _ = store.create(ROOT_INODE, b"K", FILE, 0, 0)
    allocate(store, opened, 100_000)
    write(store, opened, b"object", 50_000)
    store.close(opened, writer=True)
    assert store.record(opened.ino).state == State.SLAB
    return opened.ino


@pytest.mark.parametrize("make", [rewritten, slab])
@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_a_slab_that_was_closed_long_ago_comes_back(
    powered: Drive, cut: Cut, make: Callable[[Driven], InodeNo]
) -> None:
    """Its process lives, and has it closed: as durable as any other block. Holes are its bytes."""
    store = powered.store
    ino = make(store)
    before = get(store, ROOT_INODE, b"K")
    pass_over(store)
    powered.cut(cut)
    store = powered.start()
    assert get(store, ROOT_INODE, b"K") == before
    # A checkpoint knows its maker still, who ended with the power.
    assert store.record(ino).state in (State.ORPHAN_SLAB, State.REWRITTEN, State.SLAB)


def test_a_slab_that_is_open_again_waits_for_its_close(powered: Drive) -> None:
    store = powered.store
    ino = slab(store)
    pass_over(store)
    opened = store.open(ino, writer=True, truncate=False)
    assert store.must_forget(opened)
    store.change(ino, mode=0o600)
    pass_over(store)
    assert store.identity(ino) is None
    store.close(opened, writer=True)
    pass_over(store)
    assert store.identity(ino) is not None


def test_names_and_modes_follow_a_durable_block_at_once(powered: Drive) -> None:
    store = powered.store
    directory, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    ino = put(store, ROOT_INODE, b"K", b"x" * 5000)
    pass_over(store)
    marked = store.describe()["durability"]["marked"]
    store.rename(ROOT_INODE, b"K", directory, b"L")
    store.change(ino, mode=0o640)
    goal = (store.hurry(), store.goal())[1]
    tick_until(store, lambda: store.reached(goal), "the names are durable")
    assert store.describe()["durability"]["marked"] == marked, "its bytes were written once"
    powered.cut(Cut.NOTHING)
    store = powered.start()
    settle(store)
    assert get(store, directory, b"L") == b"x" * 5000
    assert store.record(ino).mode & 0o777 == 0o640


def test_what_the_full_list_left_out_is_found_again(powered: Drive) -> None:
    powered.stop()
    powered.settings = dataclasses.replace(powered.settings, durable_queue_max=16)
    store = powered.start()
    inos = [put(store, ROOT_INODE, b"%d" % number, b"x" * 100) for number in range(100)]
    assert store.describe()["durability"]["unlisted"] == 84
    tick_until(
        store, lambda: all(store.identity(ino) is not None for ino in inos), "all are durable"
    )


def test_a_pass_that_is_off_marks_at_the_stop_alone(powered: Drive) -> None:
    powered.stop()
    powered.settings = dataclasses.replace(powered.settings, durable_within_s=0.0)
    store = powered.start()
    ino = put(store, ROOT_INODE, b"K", b"x" * 100)
    for _ in range(20):
        store.turn_clock(lambda: 1e9)
        store.tick()
        store.run_all()
    assert store.identity(ino) is None
    powered.stop()
    store = powered.start()
    assert store.identity(ino) is not None


@pytest.mark.parametrize(
    ("limit", "most"), [("blocks of a batch", 10), ("bytes of a batch", 50_000)]
)
def test_many_blocks_are_made_durable_in_batches(
    powered: Drive, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """A batch holds descriptors, and its bytes take the device a while."""
    set_limit(monkeypatch, limit, most)
    store = powered.store
    before = store.describe()["durability"]["flushes"]
    for number in range(100):
        put(store, ROOT_INODE, b"%d" % number, b"x" * 5000)
    goal = store.goal()
    tick_until(store, lambda: store.reached(goal), "they are durable")
    assert store.describe()["durability"]["flushes"] - before >= 10
