"""Eviction under file servers that never close: what they read through kvfs is taken from them."""

import os
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import DeadInode, Exists, NoSpace, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import SERVER
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven import Driven, Opened
from tests.support.store.stores import FILE, MIB, Host, assert_exact, get, host, put, settle, write

CAPACITY_BYTES: Final = 64 * MIB
BLOCK_BYTES: Final = 4 * MIB
BLOCKS: Final = CAPACITY_BYTES // BLOCK_BYTES


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def name_of(number: int) -> bytes:
    return b"%04d" % number


def store_served(store: Driven, number: int, *, passing: bool = False) -> Opened:
    """Store a block as a server does for its client; it goes on having it open."""
    name = name_of(number)
    opened, _ = store.create(ROOT_INODE, name + b".tmp", FILE, 0, 0, SERVER)
    store.serve(opened, writer=True, passing=passing)
    write(store, opened, name[-1:] * BLOCK_BYTES)
    store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name, replace=True, who=SERVER)
    store.tick_heat(store.now_s() + 10 * number)
    return opened


def found(store: Driven, number: int) -> InodeNo | None:
    try:
        return store.lookup(ROOT_INODE, name_of(number))
    except NotFound:
        return None


def test_a_server_that_closes_nothing_stores_five_times_the_capacity(running: Host) -> None:
    """[life-server] The oldest go, with their space; what is there is whole."""
    store = running.store
    held = [store_served(store, number) for number in range(5 * BLOCKS)]
    there = [number for number in range(5 * BLOCKS) if found(store, number) is not None]
    assert there == list(range(5 * BLOCKS - len(there), 5 * BLOCKS))
    assert len(there) >= BLOCKS - 2
    for number in there:
        assert get(store, ROOT_INODE, name_of(number)) == name_of(number)[-1:] * BLOCK_BYTES
    settle(store)
    assert_exact(running)
    for opened in held:
        store.close_served(opened, writer=True)
    assert store.open_inos == set()
    assert_exact(running)


def test_what_went_is_stale_for_the_server(running: Host) -> None:
    """[life-server] Never other bytes, and never short: each call fails."""
    store = running.store
    opened = store_served(store, 0)
    reader = store.open_served(opened.ino, writer=False)
    assert os.pread(store.extent_fd(reader), 1, 0) == b"0"
    for number in range(1, BLOCKS + 1):
        store_served(store, number)
    assert found(store, 0) is None
    for call in (
        lambda: store.extent_fd(reader),
        lambda: store.present(opened.ino),
        lambda: store.open_served(opened.ino, writer=False),
        lambda: store.open_served(opened.ino, writer=True),
        lambda: store.truncate(opened.ino, 0, SERVER),
    ):
        with pytest.raises(DeadInode):
            call()
    store.close_served(reader, writer=False)
    store.close_served(opened, writer=True)
    assert opened.ino not in store.open_inos
    settle(store)
    assert_exact(running)


def test_what_is_being_read_stays(running: Host) -> None:
    """By a local process, and by a server on passthrough or in the middle of a transfer."""
    store = running.store
    held = [store_served(store, 0), store_served(store, 1, passing=True), store_served(store, 2)]
    reader = store.open_to_read(held[0].ino)
    held[2].transfers += 1
    for number in range(3, 2 * BLOCKS):
        store_served(store, number)
    for number, opened in enumerate(held):
        assert found(store, number) == opened.ino
        assert get(store, ROOT_INODE, name_of(number)) == b"%d" % number * BLOCK_BYTES
    held[2].transfers -= 1
    store.close(reader, writer=False)
    for number in range(2 * BLOCKS, 4 * BLOCKS):
        store_served(store, number)
    assert [found(store, number) is not None for number in range(3)] == [False, True, False]
    settle(store)
    assert_exact(running)


def test_servers_keep_a_part_of_the_pool_on_passthrough(running: Host) -> None:
    """Half of it by default; what they open beyond that they must ask for."""
    store = running.store
    held = [store_served(store, number, passing=True) for number in range(BLOCKS // 2)]
    local = put(store, ROOT_INODE, b"local", bytes(BLOCK_BYTES))
    more = store.open_served(local, writer=False)
    assert store.must_ask(more)
    assert not store.must_ask(held[0]), "it is theirs already"
    store.close_served(held[0], writer=True, passing=True)
    assert not store.must_ask(more)
    store.close_served(more, writer=False)
    for opened in held[1:]:
        store.close_served(opened, writer=True, passing=True)
    assert_exact(running)


def test_what_servers_keep_on_passthrough_fills_a_pool(running: Host) -> None:
    """Which the bound keeps them from: nobody else can give it back."""
    for number in range(BLOCKS):
        store_served(running.store, number, passing=True)
    with pytest.raises(NoSpace):
        store_served(running.store, BLOCKS, passing=True)


def test_a_rename_by_a_server_is_one_lasting_transaction(running: Host) -> None:
    """As that of a client that closed before; each more would be a write of the index."""
    running.stop()
    commits = FailingSyscalls(["commit"])
    store = running.start(syscalls=commits)
    opened, _ = store.create(ROOT_INODE, b"block.tmp", FILE, 0, 0, SERVER)
    store.serve(opened, writer=True, passing=False)
    write(store, opened, b"bytes")
    before = commits.calls
    store.rename(ROOT_INODE, b"block.tmp", ROOT_INODE, b"block", replace=True, who=SERVER)
    assert commits.calls == before + 1
    assert store.records()[opened.ino].state == State.PUBLISHED
    assert get(store, ROOT_INODE, b"block") == b"bytes"


def test_a_rename_that_is_refused_leaves_what_a_server_may_go_on_writing(running: Host) -> None:
    """[life-server] It counts as closed, until it writes again."""
    store = running.store
    put(store, ROOT_INODE, b"taken", b"other")
    opened, _ = store.create(ROOT_INODE, b"block.tmp", FILE, 0, 0, SERVER)
    store.serve(opened, writer=True, passing=False)
    write(store, opened, b"half")
    with pytest.raises(Exists):
        store.rename(ROOT_INODE, b"block.tmp", ROOT_INODE, b"taken", replace=False, who=SERVER)
    assert get(store, ROOT_INODE, b"taken") == b"other"
    assert (opened.writers, opened.quiet_writers) == (0, 1)
    running.extent(opened.ino).write_bytes(b"half and whole")
    assert store.present(opened.ino).size_bytes == len(b"half and whole")
    assert (opened.writers, opened.quiet_writers) == (1, 0)
    store.rename(ROOT_INODE, b"block.tmp", ROOT_INODE, b"block", replace=True, who=SERVER)
    assert get(store, ROOT_INODE, b"block") == b"half and whole"
    store.close_served(opened, writer=True)
    settle(store)
    assert_exact(running)
