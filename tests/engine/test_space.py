"""The bound of the pool: what counts as used, and who gives way first."""

import os
import random

import pytest

from kvfs.core.errors import NoSpace
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, round_up
from kvfs.pool.space.space import Space
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven import AllocationRequest, Opened
from tests.support.store.stores import (
    FILE,
    MIB,
    Host,
    allocate,
    assert_exact,
    host,
    put,
    settle,
    write,
)


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


def test_what_has_no_name_is_not_told_as_published(running: Host) -> None:
    """Of four blocks one stays, one is removed and open, one removed and mapped, one just gone."""
    store = running.store
    for number, name in enumerate((b"grave", b"open", b"mapped", b"stays"), 1):
        put(store, ROOT_INODE, b"new.tmp", bytes(number * MIB))
        store.rename(ROOT_INODE, b"new.tmp", ROOT_INODE, name, replace=True)
    opened = store.open_to_read(store.lookup(ROOT_INODE, b"open"))
    mapped = running.extent(store.lookup(ROOT_INODE, b"mapped"))
    settle(store)
    assert store.describe()["states"]["published"] == {"blocks": 4, "bytes": 10 * MIB}
    with mapped.open("rb"):
        store.unlink(ROOT_INODE, b"mapped")
        store.erase_removed()
        store.drain()
        store.unlink(ROOT_INODE, b"open")
        store.unlink(ROOT_INODE, b"grave")
        told = store.describe()
    assert told["states"]["published"] == {"blocks": 1, "bytes": 4 * MIB}
    assert told["states"]["gone"] == {"blocks": 2, "bytes": 5 * MIB}
    assert told["deleted_open_bytes"] == 5 * MIB
    assert told["recently_deleted"] == 1
    states = {state: row for state, row in told["states"].items() if state != "preallocated"}
    assert sum(row["bytes"] for row in states.values()) == told["used_bytes"] == 9 * MIB
    store.close(opened, writer=False)
    settle(store)
    assert store.describe()["deleted_open_bytes"] == 0
    assert "gone" not in store.describe()["states"]
    assert_exact(running)


def test_ready_extents_give_way_to_writers(running: Host) -> None:
    store = running.store
    for number in range(8):
        put(store, ROOT_INODE, b"%d" % number, b"x" * MIB)
    settle(store)
    assert store.space.ready_bytes > 0
    opened, _ = store.create(ROOT_INODE, b"last", FILE, 0, 0)
    write(store, opened, b"y" * (56 * MIB))
    assert store.describe()["preallocated_extents"] == 0
    assert store.space.used_bytes == 64 * MIB
    store.close(opened, writer=True)
    assert_exact(running)


def test_what_was_removed_a_moment_ago_gives_way_too(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"old", b"x" * MIB)
    store.unlink(ROOT_INODE, b"old")
    put(store, ROOT_INODE, b"new", b"y" * (64 * MIB))
    assert store.describe()["recently_deleted"] == 0
    settle(store)
    assert_exact(running)


def test_a_draft_holds_its_reserve_until_it_is_closed(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"a", b"x" * MIB)
    opened, _ = store.create(ROOT_INODE, b"b", FILE, 0, 0)
    assert store.space.used_bytes == 2 * MIB
    assert_exact(running)
    store.close(opened, writer=True)
    assert store.space.used_bytes == MIB
    assert_exact(running)


def test_while_sizes_vary_room_is_kept_for_a_draft_larger_than_all_of_late(running: Host) -> None:
    """It would else stand above the bound from its last write to the next look at it."""
    store = running.store
    store.let_writers_run()
    for number, size in enumerate((MIB, MIB, 7 * MIB // 4, MIB)):
        put(store, ROOT_INODE, b"%d" % number, b"x" * size)
    drafts = [store.create(ROOT_INODE, b"a%d" % at, FILE, 0, 0)[0] for at in range(2)]
    usual_bytes = store.usual_bytes(ROOT_INODE)
    kept_bytes = (7 * MIB // 4 - usual_bytes) // 2
    assert kept_bytes > MIB // 4
    assert not any(opened.through_daemon for opened in drafts)
    assert store.space.lacking_bytes == kept_bytes, "for both together"
    store.watch(0.0)
    assert store.space.lacking_bytes == kept_bytes
    slab, _ = store.create(ROOT_INODE, b"slab", FILE, 0, 0)
    allocate(store, slab, slab.allocated_bytes + store.space.unclaimed_bytes)
    assert store.space.unclaimed_bytes + store.space.ready_bytes <= 0, "nothing fits"
    left_bytes = store.space.bound_bytes - store.space.taken_bytes
    assert left_bytes >= kept_bytes, "the slab may not have it"
    os.pwrite(drafts[0].fd, bytes(kept_bytes), drafts[0].allocated_bytes)
    assert os.fstat(drafts[0].fd).st_blocks * 512 > drafts[0].allocated_bytes
    store.watch(0.1)
    assert store.space.overcommitted_bytes == 0
    for opened in (*drafts, slab):
        store.close(opened, writer=True)
    store.watch(0.2)
    assert store.space.lacking_bytes == 0
    settle(store)
    assert_exact(running)


# ---- holes ----


def test_holes_are_filled_up_to_the_capacity_and_no_farther(running: Host) -> None:
    """UCM, FlexKV, vLLM: ftruncate, then pieces in any order."""
    store = running.store
    slab, _ = store.create(ROOT_INODE, b"slab", FILE, 0, 0)
    store.truncate(slab.ino, 96 * MIB)
    for at in range(48, 96):
        write(store, slab, bytes(MIB), at * MIB)
    for at in range(16):
        write(store, slab, bytes(MIB), at * MIB)
    assert store.space.used_bytes == store.space.capacity_bytes == 64 * MIB
    for again in ("the writer", "who opens it again, and cannot know where the holes are"):
        write(store, slab, bytes(2 * MIB), 14 * MIB)
        write(store, slab, bytes(MIB), 95 * MIB)
        assert store.growth_bytes(slab, 17 * MIB, 2 * MIB) == MIB, again
        store.close(slab, writer=True)
        slab = store.open(slab.ino, writer=True, truncate=False)
    with pytest.raises(NoSpace):
        write(store, slab, bytes(MIB), 16 * MIB)
    store.close(slab, writer=True)
    assert_exact(running)


@pytest.mark.parametrize("mode", [0, FALLOC_FL_KEEP_SIZE])
def test_each_piece_of_a_slab_asks_for_its_room(running: Host, mode: int) -> None:
    store = running.store
    slab, _ = store.create(ROOT_INODE, b"slab", FILE, 0, 0)
    allocate(store, slab, 40 * MIB, 40 * MIB, mode=mode)
    with pytest.raises(NoSpace):
        allocate(store, slab, 40 * MIB, mode=mode)
    with pytest.raises(NoSpace):
        write(store, slab, bytes(25 * MIB))
    allocate(store, slab, 24 * MIB, mode=mode)
    assert store.space.used_bytes == 64 * MIB
    store.close(slab, writer=True)
    assert_exact(running)


def test_a_punched_hole_is_room_for_others(running: Host) -> None:
    store = running.store
    slab, _ = store.create(ROOT_INODE, b"slab", FILE, 0, 0)
    allocate(store, slab, 64 * MIB)
    allocate(store, slab, 8 * MIB, 8 * MIB, mode=FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)
    put(store, ROOT_INODE, b"block", bytes(8 * MIB))
    write(store, slab, bytes(8 * MIB))
    with pytest.raises(NoSpace):
        write(store, slab, bytes(MIB), 8 * MIB)


def test_what_is_reserved_from_the_beginning_needs_no_room(running: Host) -> None:
    """Also of a file with holes, though the file system calls a reserve a hole, too."""
    store = running.store
    slab, _ = store.create(ROOT_INODE, b"slab", FILE, 0, 0)
    allocate(store, slab, 40 * MIB)
    store.truncate(slab.ino, 200 * MIB)
    write(store, slab, bytes(24 * MIB), 100 * MIB)
    assert store.space.unclaimed_bytes == 0
    write(store, slab, bytes(8 * MIB), 32 * MIB)
    with pytest.raises(NoSpace):
        write(store, slab, bytes(8 * MIB), 33 * MIB)


def test_bytes_in_their_order_are_written_without_a_look(running: Host) -> None:
    running.stop()
    calls = FailingSyscalls(["lseek"])
    store = running.start(calls)
    for name, start in ((b"block", 0), (b"next", 3)):  # the second one has a reserve
        opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0)
        for at in (*range(start, 8), 0, 5):
            write(store, opened, bytes(MIB), at * MIB)
        store.close(opened, writer=True)
    assert calls.calls == 0


def allocates_at_most(running: Host, opened: Opened, draw: random.Random) -> None:
    """Do one thing to a file; it takes what it said, and the same once more takes nothing."""
    store = running.store
    offset_bytes, size_bytes = draw.randrange(400_000), draw.randrange(1, 80_000)
    before_bytes = opened.allocated_bytes
    asked_bytes, what = 0, draw.choice("wwwwwrpt")
    if what == "w":
        asked_bytes = store.growth_bytes(opened, offset_bytes + size_bytes, size_bytes)
        write(store, opened, bytes(size_bytes), offset_bytes)
        again_bytes = store.growth_bytes(opened, offset_bytes + size_bytes, size_bytes)
        assert again_bytes < PAGE_BYTES
    elif what == "r":
        asked_bytes = store.allocation_bytes(opened, AllocationRequest(0, offset_bytes, size_bytes))
        allocate(store, opened, size_bytes, offset_bytes)
    elif what == "p":
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        allocate(store, opened, size_bytes, offset_bytes, mode=mode)
    else:
        store.truncate(opened.ino, offset_bytes)
    # What it begins and ends in counts as a whole.
    assert opened.allocated_bytes - before_bytes <= round_up(asked_bytes) + PAGE_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_nothing_allocates_more_than_it_asks_for(seed: int) -> None:
    draw = random.Random(seed)
    with host() as made:
        store = made.start()
        if seed % 2:
            put(store, ROOT_INODE, b"usual", bytes(160_000))  # so that it gets a reserve
        opened, _ = store.create(ROOT_INODE, b"file", FILE, 0, 0)
        for _ in range(60):
            allocates_at_most(made, opened, draw)
        store.close(opened, writer=True)
        assert_exact(made)
