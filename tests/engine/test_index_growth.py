"""The index grows on a full device: blocks give way for it, and deletes always have room."""

import contextlib
from collections.abc import Iterator

import pytest

from kvfs.core.errors import KvfsError, NoSpace
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.mounts.mounting import mounted_at, workplace
from tests.support.store.driven import Driven
from tests.support.store.stores import (
    DIRECTORY,
    MIB,
    Host,
    assert_exact,
    make_directory,
    put,
    settle,
)

pytestmark = pytest.mark.needs_fuse  # a file system of its own is mounted

#: Less than the capacity says, and far more than all names of these tests.
DEVICE_BYTES = 24 * MIB
BLOCK_BYTES = MIB // 4
#: Rows of some 600 bytes.
LONG = b"n" * 200


@pytest.fixture
def running() -> Iterator[Host]:
    with (
        workplace("disk") as place,
        mounted_at(place / "memory", "-t", "tmpfs", "-o", f"size={DEVICE_BYTES}", "kvfs") as memory,
    ):
        (memory / "pool").mkdir()
        made = Host(memory / "pool", capacity_bytes=64 * MIB)
        made.start()
        try:
            yield made
        finally:
            made.end()


def store_block(store: Driven, number: int) -> InodeNo:
    """Store a block as connectors do; raises NoSpace."""
    name = b"block %06d" % number
    ino = put(store, ROOT_INODE, name + b".tmp", bytes(BLOCK_BYTES))
    store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name, replace=True)
    return ino


def fill(store: Driven, first: int = 0) -> None:
    """Store more blocks than the device holds."""
    for number in range(first, first + 2 * DEVICE_BYTES // BLOCK_BYTES):
        store_block(store, number)
        if number % 8 == 0:
            settle(store)


def grow(store: Driven, parent: InodeNo, count: int) -> int:
    """Make up to *count* names that may not go; return how many there are then."""
    for number in range(count):
        try:
            store.make_node(parent, LONG + b"%06d" % number, DIRECTORY, 0, 0)
        except NoSpace:
            return number
        if number % 64 == 0:
            store.tick()
    return count


@pytest.mark.usefixtures("caplog")  # a ready extent that finds no room is a warning
def test_blocks_give_way_for_names(running: Host) -> None:
    store = running.store
    store.look_at_device()
    fill(store)
    evicted = store.evicted_blocks
    made = grow(store, make_directory(running, b"names"), 4000)
    assert made == 4000
    assert store.evicted_blocks > evicted
    for number in range(10_000, 10_008):
        store.look_at_device()  # as each tick does
        store_block(store, number)
        settle(store)
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
def test_names_without_end_leave_room_for_deletes(running: Host) -> None:
    """A commit that finds no room takes the pool's blocks along: nothing could be evicted."""
    store = running.store
    store.look_at_device()
    fill(store)
    top = make_directory(running, b"names")
    made = grow(store, top, 200_000)
    assert made < 200_000
    for _ in range(20):  # each is refused, and takes nothing
        with contextlib.suppress(KvfsError):
            store.make_node(top, b"more", DIRECTORY, 0, 0)
    for number in range(made):
        store.rmdir(top, LONG + b"%06d" % number)
        if number % 64 == 0:
            store.tick()
    assert store.counters.directories == 2  # the root and its one
    assert_exact(running)
