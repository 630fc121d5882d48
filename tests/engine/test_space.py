"""The bound of the pool: what counts as used, and who gives way first."""

import os

import pytest

from kvfs.errors import NoSpace
from kvfs.space import Space
from kvfs.types import PAGE_BYTES, ROOT_INODE
from tests.support.stores import FILE, MIB, Host, allocate, assert_exact, put, settle, write


def test_used_is_what_is_recorded_and_what_is_open_beyond_it() -> None:
    space = Space(1000, 300)
    space.extra_bytes = 200
    assert (space.used_bytes, space.free_bytes) == (500, 500)


def test_ready_extents_are_free_to_those_who_store() -> None:
    space = Space(1000, 300)
    space.ready_bytes = 100
    assert space.free_bytes == 700
    space.require(700)
    with pytest.raises(NoSpace):
        space.require(701)


def test_a_capacity_below_what_is_there_leaves_nothing_free() -> None:
    space = Space(1000, 3000)
    assert space.free_bytes == 0
    with pytest.raises(NoSpace):
        space.require(1)


def test_statfs_totals_never_change(running: Host) -> None:
    before = running.store.totals()
    put(running.store, ROOT_INODE, b"a", b"x" * 50_000)
    after = running.store.totals()
    assert (after.blocks, after.inodes) == (before.blocks, before.inodes)
    assert before.blocks * PAGE_BYTES == 64 * MIB
    assert before.blocks_free - after.blocks_free == 13
    assert before.inodes_free - after.inodes_free == 1


def test_ready_extents_give_way_to_writers(running: Host) -> None:
    store = running.store
    for number in range(8):
        put(store, ROOT_INODE, b"%d" % number, b"x" * MIB)
    settle(store)
    assert store.pool.space.ready_bytes > 0
    opened, _ = store.blocks.create(ROOT_INODE, b"last", FILE, 0, 0)
    write(store, opened, b"y" * (56 * MIB))
    assert store.pool.ready.count == 0
    assert store.pool.space.used_bytes == 64 * MIB
    store.blocks.close(opened, writer=True)
    assert_exact(running)


def test_what_was_removed_a_moment_ago_gives_way_too(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"old", b"x" * MIB)
    store.namespace.unlink(ROOT_INODE, b"old")
    put(store, ROOT_INODE, b"new", b"y" * (64 * MIB))
    assert len(store.pool.graves) == 0
    settle(store)
    assert_exact(running)


def test_a_draft_holds_its_reserve_until_it_is_closed(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"a", b"x" * MIB)
    opened, _ = store.blocks.create(ROOT_INODE, b"b", FILE, 0, 0)
    assert store.pool.space.used_bytes == 2 * MIB
    assert_exact(running)
    store.blocks.close(opened, writer=True)
    assert store.pool.space.used_bytes == MIB
    assert_exact(running)


def test_while_sizes_vary_room_is_kept_for_a_draft_larger_than_all_of_late(running: Host) -> None:
    """It would else stand above the bound from its last write to the next look at it."""
    store = running.store
    store.pool.writers_run_free = True
    space = store.pool.space
    for number, size in enumerate((MIB, MIB, 7 * MIB // 4, MIB)):
        put(store, ROOT_INODE, b"%d" % number, b"x" * size)
    drafts = [store.blocks.create(ROOT_INODE, b"a%d" % at, FILE, 0, 0)[0] for at in range(2)]
    usual_bytes = store.pool.ready.demand.usual_bytes(ROOT_INODE)
    kept_bytes = (7 * MIB // 4 - usual_bytes) // 2
    assert kept_bytes > MIB // 4
    assert not any(opened.through_daemon for opened in drafts)
    assert space.lacking_bytes == kept_bytes, "for both together"
    store.watch.tick(0.0)
    assert space.lacking_bytes == kept_bytes
    slab, _ = store.blocks.create(ROOT_INODE, b"slab", FILE, 0, 0)
    allocate(store, slab, slab.allocated_bytes + space.unclaimed_bytes)
    with pytest.raises(NoSpace):
        space.require(1)
    assert space.bound_bytes - space.taken_bytes >= kept_bytes, "the slab may not have it"
    os.pwrite(drafts[0].fd, bytes(kept_bytes), drafts[0].allocated_bytes)
    assert os.fstat(drafts[0].fd).st_blocks * 512 > drafts[0].allocated_bytes
    store.watch.tick(0.1)
    assert space.overcommitted_bytes == 0
    for opened in (*drafts, slab):
        store.blocks.close(opened, writer=True)
    store.watch.tick(0.2)
    assert space.lacking_bytes == 0
    settle(store)
    assert_exact(running)
