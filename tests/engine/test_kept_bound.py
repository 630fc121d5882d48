"""What is pinned or under evict=never counts as it comes, and what is over the bound may go."""

import dataclasses
from collections.abc import Iterator

import pytest

from kvfs.core.directory_policy import EVICT, PIN
from kvfs.core.eviction_policy import Rank
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven import Driven
from tests.support.store.stores import FILE, MIB, Host, host, make_directory, put, settle, write

#: Of which half may be kept.
CAPACITY_BYTES = 16 * MIB


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def stored(store: Driven, parent: InodeNo, name: bytes, size_bytes: int = MIB) -> InodeNo:
    """Store a block as connectors do that publish."""
    ino = put(store, parent, name + b".tmp", bytes(size_bytes))
    store.rename(parent, name + b".tmp", parent, name, replace=True)
    return ino


def kept(store: Driven, inos: list[InodeNo]) -> list[bool]:
    return [store.is_kept(ino) for ino in inos]


@pytest.mark.parametrize(("name", "word"), [(PIN, b"1"), (EVICT, b"never")])
def test_who_came_first_stays_also_after_a_start(running: Host, name: bytes, word: bytes) -> None:
    store = running.store
    top = make_directory(running, b"top", uid=1000)
    store.set_xattr(top, name, word, uid=1000)
    inos = [stored(store, top, b"%02d" % number) for number in range(12)]
    assert kept(store, inos) == [True] * 8 + [False] * 4
    settle(store)
    assert kept(store, inos) == [True] * 8 + [False] * 4
    running.stop()
    store = running.start()
    settle(store)
    assert kept(store, inos) == [True] * 8 + [False] * 4
    for number in range(30):
        stored(store, ROOT_INODE, b"%02d" % number)
    left = [number for _, number in store.children(top, InodeNo(0))]
    assert left == [b"%02d" % number for number in range(8)]


def test_what_was_there_before_it_was_kept_counts_too(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    inos = [stored(store, top, b"%02d" % number) for number in range(12)]
    store.set_xattr(top, EVICT, b"never")
    settle(store)
    assert sum(kept(store, inos)) == 8
    assert store.describe()["pinned_bytes"] == 8 * MIB
    assert store.evictable_bytes == 4 * MIB
    store.set_xattr(top, EVICT, b"auto")
    settle(store)
    assert sum(kept(store, inos)) == 0


def test_a_kept_block_that_grows_beyond_the_bound_may_go(running: Host) -> None:
    store = running.store
    store.set_xattr(ROOT_INODE, PIN, b"1")
    ino = stored(store, ROOT_INODE, b"small")
    assert kept(store, [ino]) == [True]
    opened = store.open(ino, writer=True, truncate=False, appends=True)
    write(store, opened, bytes(8 * MIB), MIB)
    store.close(opened, writer=True)
    store.rename(ROOT_INODE, b"small", ROOT_INODE, b"large", replace=True)
    assert kept(store, [ino]) == [False]
    assert store.held_bytes(Rank.KEPT) == 0


def test_leases_leave_less_to_be_kept_and_take_nothing_away(running: Host) -> None:
    running.stop()
    store = running.start(settings=dataclasses.replace(running.settings, lease_max=0.75))
    first = make_directory(running, b"first")
    store.set_xattr(first, PIN, b"1")
    inos = [stored(store, first, b"%02d" % number) for number in range(4)]
    opened, _ = store.create(ROOT_INODE, b"leased", FILE, 0, 0)
    write(store, opened, bytes(9 * MIB))
    store.close(opened, writer=True)
    assert store.describe()["leased_bytes"] == 9 * MIB
    # 0.92 for both together.
    inos += [stored(store, first, b"later%d" % number) for number in range(3)]
    assert kept(store, inos) == [True] * 5 + [False] * 2
    store.rank_anew()
    settle(store)
    assert kept(store, inos[:5]) == [True] * 5
    assert store.describe()["lease_max_bytes"] == int(0.92 * CAPACITY_BYTES) - 5 * MIB
