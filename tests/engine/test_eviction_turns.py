"""What one turn of an eviction looks at, plans and removes is bounded, and so is a command."""

import contextlib
from collections.abc import Iterator

import pytest

from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import DIRECTORY, MIB, Host, host, put

CAPACITY_BYTES = 64 * MIB


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def store_block(store: Driven, name: bytes, size_bytes: int) -> None:
    put(store, ROOT_INODE, b"tmp", name[:1] * size_bytes)
    store.rename(ROOT_INODE, b"tmp", ROOT_INODE, name, replace=True)


def names(store: Driven) -> set[bytes]:
    return {name for _, name in store.children(ROOT_INODE, InodeNo(0))}


def fill(store: Driven) -> list[bytes]:
    """Fill the pool with blocks of 4 MiB, each in a burst of its own; return their names."""
    found = []
    for number in range(CAPACITY_BYTES // (4 * MIB)):
        name = b"%02d" % number
        store_block(store, name, 4 * MIB)
        store.tick_heat(store.now_s() + 10 * number)
        found.append(name)
    return found


def test_one_call_removes_so_many_names_and_no_more(running: Host) -> None:
    """Requests wait for it; who needs more calls again."""
    store = running.store
    for number in range(600):
        store_block(store, b"%03d" % number, 100)
    store.evict(CAPACITY_BYTES)
    assert 256 <= store.evicted_blocks < 256 + 128


def test_who_holds_most_is_told_by_a_sample(running: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes some microseconds, and a million may be leased."""
    set_limit(monkeypatch, "rows of a sample", 2)
    store = running.store
    for directory, blocks in ((b"few", 2), (b"many", 13)):
        parent, _ = store.make_node(ROOT_INODE, directory, DIRECTORY, 0, 0)
        for number in range(blocks):
            put(store, parent, b"%d" % number, b"x" * (4 * MIB))
    assert "/few" in store.describe()["warning"]


def test_one_call_makes_a_few_plans_of_so_many_blocks(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no plan is a list of all blocks; who needs more calls again."""
    set_limit(monkeypatch, "plan_blocks", 2)
    store = running.store
    fill(store)
    store.evict(CAPACITY_BYTES)
    assert store.evicted_blocks <= 4 * 2
    while names(store):
        assert store.evict(CAPACITY_BYTES)


def test_a_command_for_blocks_that_others_map_ends(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "steps in vain", 3)
    store = running.store
    before = fill(store)
    with contextlib.ExitStack() as users:
        for name in before:
            extent = running.extent(store.lookup(ROOT_INODE, name))
            users.enter_context(extent.open("rb"))
        assert store.evict_by_policy(8 * MIB) < 100
    assert set(before) == names(store)


def test_when_many_were_passed_over_all_are_looked_at_again(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second passes here, in which those that were in use are left out of the next plan."""
    set_limit(monkeypatch, "plan_blocks", 6)
    set_limit(monkeypatch, "plan_refused", 3)
    store = running.store
    before = fill(store)
    store.turn_clock(lambda: 1e6)
    with contextlib.ExitStack() as users:
        for name in before[:5]:
            extent = running.extent(store.lookup(ROOT_INODE, name))
            users.enter_context(extent.open("rb"))
        store.evict(4 * MIB)
        assert set(before) - names(store) == {before[5]}
    store.evict(4 * MIB)
    assert set(before) - names(store) == {before[0], before[5]}
