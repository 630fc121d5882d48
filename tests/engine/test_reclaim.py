"""Eviction carried out: what may go, in which order, and that nothing else changes."""

import os
from collections.abc import Iterator

import pytest

from kvfs.core.errors import DeadInode, NoSpace, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.engine.store import Store
from kvfs.machine.processes import NOBODY
from tests.support.stores import DIRECTORY, FILE, MIB, Host, assert_exact, get, host, settle, write

CAPACITY_BYTES = 64 * MIB


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def store_block(
    store: Store, name: bytes, size_bytes: int = 4 * MIB, parent: InodeNo = ROOT_INODE
) -> InodeNo:
    """Store a block as connectors do that publish: temporary name, rename."""
    opened, _ = store.blocks.create(parent, name + b".tmp", FILE, 0, 0)
    try:
        write(store, opened, name[:1] * size_bytes)
    finally:
        store.blocks.close(opened, writer=True)
    store.rename(parent, name + b".tmp", parent, name, replace=True)
    return opened.ino


def names(store: Store, parent: InodeNo = ROOT_INODE) -> set[bytes]:
    return {name for _, name in store.namespace.children(parent, InodeNo(0))}


def fill(store: Store, parent: InodeNo = ROOT_INODE) -> list[bytes]:
    """Fill the pool with blocks of 4 MiB, each in a burst of its own; return their names."""
    found = []
    for number in range(CAPACITY_BYTES // (4 * MIB)):
        name = b"%c%02d" % (97 + number, number)
        store_block(store, name, parent=parent)
        store.pool.heat.tick(store.pool.monotonic_s() + 10 * number)
        found.append(name)
    return found


def test_the_oldest_goes_for_a_new_one(running: Host) -> None:
    store = running.store
    before = fill(store)
    store_block(store, b"new")
    assert names(store) == {b"new", *before[1:]}
    with pytest.raises(NotFound):
        store.namespace.lookup(ROOT_INODE, before[0])
    assert get(store, ROOT_INODE, b"new") == b"n" * (4 * MIB)
    assert_exact(running)


def test_of_a_small_pool_the_oldest_go_though_all_came_at_once(running: Host) -> None:
    """All within a second, which would be one burst; the chain of a prompt is no such part."""
    store = running.store
    for number in range(48):
        store_block(store, b"%02d" % number)
        assert names(store) == {b"%02d" % left for left in range(max(0, number - 15), number + 1)}


def test_no_more_goes_than_is_needed(running: Host) -> None:
    store = running.store
    small, _ = store.namespace.make_node(ROOT_INODE, b"small", DIRECTORY, 0, 0)
    store_block(store, b"first", 100, parent=small)
    before = fill(store)
    assert len(set(before) - names(store)) == 1
    for number in range(100):
        store_block(store, b"%d" % number, 100, parent=small)
    assert len(set(before) - names(store)) == 1
    assert store.reclaim.evicted_blocks == 1
    assert_exact(running)


def test_the_parents_counts_and_times_follow(running: Host) -> None:
    store = running.store
    directory, _ = store.namespace.make_node(ROOT_INODE, b"d", DIRECTORY, 0, 0)
    fill(store, directory)
    before = store.namespace.directory(directory)
    store.evict(1)
    after = store.namespace.directory(directory)
    assert after.entries == before.entries - 1
    assert after.mtime_ns > before.mtime_ns
    settle(store)
    running.stop()
    assert running.check().problems == []


def test_what_is_open_for_reading_stays_while_others_can_go(running: Host) -> None:
    store = running.store
    before = fill(store)
    ino = store.namespace.lookup(ROOT_INODE, before[0])
    opened = store.blocks.open(ino, writer=False, truncate=False)
    fd = store.blocks.extent_fd(opened)
    for number in range(20):
        store_block(store, b"%d" % number)
    assert before[0] in names(store)
    assert os.pread(fd, 10, 0) == before[0][:1] * 10
    store.blocks.close(opened, writer=False)
    assert_exact(running)


def test_what_was_read_goes_in_its_turn_as_soon_as_that_is_done(running: Host) -> None:
    """Passed over once, it is no younger than those stored since."""
    store = running.store
    before = fill(store)
    opened = [
        store.blocks.open(store.namespace.lookup(ROOT_INODE, name), writer=False, truncate=False)
        for name in before[:4]
    ]
    store.pool.monotonic_s = lambda: 1e6  # what a plan says holds all the while
    for number in range(14):
        store_block(store, b"others%d" % number)
    assert names(store) == {*before[:4], *(b"others%d" % number for number in range(2, 14))}
    for each in opened:
        store.blocks.close(each, writer=False)
    for number in range(4):
        store_block(store, b"last%d" % number)
    assert set(before) & names(store) == set()
    assert b"others2" in names(store)
    assert_exact(running)


def test_a_mapped_block_stays(running: Host) -> None:
    """The handle is closed, but somebody still has the extent (a mapping on passthrough)."""
    store = running.store
    before = fill(store)
    ino = store.namespace.lookup(ROOT_INODE, before[0])
    with running.extent(ino).open("rb"):
        for number in range(20):
            store_block(store, b"%d" % number)
        assert before[0] in names(store)
    assert_exact(running)


def test_what_belongs_to_a_living_process_stays(running: Host) -> None:
    store = running.store
    own = store.pool.leases.processes.of(os.getpid(), store.pool.monotonic_s())
    leased = []
    for number in range(8):
        opened, _ = store.blocks.create(ROOT_INODE, b"leased%d" % number, FILE, 0, 0, own)
        write(store, opened, b"l" * (4 * MIB))
        store.blocks.close(opened, writer=True)
        leased.append(b"leased%d" % number)
    for number in range(30):
        store_block(store, b"%d" % number)
    assert set(leased) <= names(store)
    assert_exact(running)


def test_policies_and_pins_are_kept(running: Host) -> None:
    store = running.store
    kept, _ = store.namespace.make_node(ROOT_INODE, b"kept", DIRECTORY, 0, 0)
    first, _ = store.namespace.make_node(ROOT_INODE, b"first", DIRECTORY, 0, 0)
    store.attributes.set_xattr(kept, b"user.kvfs.evict", b"never")
    store.attributes.set_xattr(first, b"user.kvfs.evict", b"first")
    store_block(store, b"k", parent=kept)
    pinned = store_block(store, b"pinned")
    store.attributes.set_xattr(pinned, b"user.kvfs.pin", b"1")
    ordinary = store_block(store, b"ordinary")
    settle(store)
    store_block(store, b"f", parent=first)
    store.evict(1)
    assert names(store, first) == set()
    store.evict(CAPACITY_BYTES)
    assert names(store, kept) == {b"k"}
    assert b"pinned" in names(store)
    with pytest.raises(DeadInode):
        store.namespace.record(ordinary)
    assert_exact(running)


@pytest.mark.parametrize("walked", [True, False], ids=["ranked", "found by plans"])
def test_any_number_of_pinned_blocks_keeps_no_other_from_going(
    running: Host, walked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.engine.eviction.reclaim._PLAN_MAX", 2)
    monkeypatch.setattr("kvfs.engine.eviction.victims._REFUSED_MAX", 3)
    store = running.store
    pinned, _ = store.namespace.make_node(ROOT_INODE, b"pinned", DIRECTORY, 0, 0)
    for number in range(12):  # longer than all rounds of a call can pass over
        store_block(store, b"%02d" % number, MIB, parent=pinned)
    store.attributes.set_xattr(pinned, b"user.kvfs.pin", b"1")
    if walked:
        settle(store)
    store_block(store, b"ordinary", MIB)
    for _ in range(1 if walked else 2):
        store.reclaim.search_anew()  # as somebody does who waits
        store.evict(MIB)
    assert names(store) == {b"pinned"}
    assert len(names(store, pinned)) == 12
    assert_exact(running)


def test_what_may_go_is_told_without_the_pinned_and_with_all_others(running: Host) -> None:
    store = running.store
    pinned, _ = store.namespace.make_node(ROOT_INODE, b"pinned", DIRECTORY, 0, 0)
    for number in range(6):
        store_block(store, b"%02d" % number, parent=pinned)
    store.attributes.set_xattr(pinned, b"user.kvfs.pin", b"1")
    store_block(store, b"ordinary")
    settle(store)
    assert store.pool.evictable_bytes == 4 * MIB
    free_bytes = store.totals().blocks_free * 4096
    assert free_bytes == CAPACITY_BYTES - 24 * MIB
    store_block(store, b"later", parent=pinned)
    assert store.pool.evictable_bytes == 4 * MIB
    assert store.describe()["pinned_bytes"] == 28 * MIB
    for number in range(6):
        store.namespace.unlink(pinned, b"%02d" % number)
    assert store.pool.evictable_bytes == 4 * MIB
    assert store.describe()["pinned_bytes"] == 4 * MIB
    assert store.pool.pins.pinned_bytes == 24 * MIB  # of when it was set
    assert_exact(running)


def test_a_sidecar_goes_with_its_block(running: Host) -> None:
    store = running.store
    store_block(store, b"1.bucket")
    store_block(store, b"1.meta", 100)
    store_block(store, b"2.safetensors")
    store_block(store, b"2.safetensors.metadata", 4096)
    store_block(store, b"config.json", 100)
    store.evict(8 * MIB)
    assert names(store) == {b"config.json"}
    assert_exact(running)


def test_when_nothing_may_go_it_is_no_space_for_that_draft_alone(running: Host) -> None:
    store = running.store
    settle(store)
    drafts = []
    for number in range(3):
        opened, _ = store.blocks.create(ROOT_INODE, b"%d.tmp" % number, FILE, 0, 0)
        write(store, opened, b"x" * (21 * MIB))
        drafts.append(opened)
    with pytest.raises(NoSpace):
        write(store, drafts[0], b"x" * (2 * MIB), 21 * MIB)
    assert not store.reclaim.hopeful
    for opened in drafts:
        store.blocks.close(opened, writer=True)
    assert names(store) == {b"1.tmp", b"2.tmp"}
    assert_exact(running)


def test_the_pool_names_the_directory_that_holds_its_space(running: Host) -> None:
    store = running.store
    assert store.describe()["warning"] is None
    directory, _ = store.namespace.make_node(ROOT_INODE, b"holder", DIRECTORY, 0, 0)
    opened, _ = store.blocks.create(directory, b"draft", FILE, 0, 0)
    write(store, opened, b"x" * (62 * MIB))
    assert "/holder" in store.describe()["warning"]
    store.blocks.close(opened, writer=True)
    assert store.describe()["leased_bytes"] == 62 * MIB


def test_a_failing_index_evicts_nothing_and_changes_nothing(
    running: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = running.store
    before = set(fill(store))

    def refuse(_txn: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store.pool.index._syscalls, "commit", refuse)
    assert store.evict(MIB) == 0
    monkeypatch.undo()
    assert names(store) == before
    assert "nothing evicted" in caplog.text
    assert_exact(running)


def test_what_is_evicted_counts_until_it_is_off_the_device(running: Host) -> None:
    store = running.store
    fill(store)
    settle(store)
    taken_bytes = store.pool.space.taken_bytes
    store.evict(4 * MIB)
    assert store.pool.space.pending_delete_bytes == 4 * MIB
    assert store.pool.space.taken_bytes == taken_bytes
    store.pool.background.drain()
    assert store.pool.space.pending_delete_bytes == 0
    assert_exact(running)


def test_what_somebody_maps_counts_until_he_is_done(running: Host) -> None:
    """Its name and its handle are gone, but its bytes would not come back with its extent."""
    store = running.store
    ino = store_block(store, b"block")
    store_block(store, b"other")
    settle(store)
    with running.extent(ino).open("rb"):
        store.namespace.unlink(ROOT_INODE, b"block")
        store.pool.recently_removed.give_way()
        store.pool.background.drain()
        space = store.pool.space
        assert (space.pending_delete_bytes, space.deleted_open_bytes) == (0, 4 * MIB)
        assert space.taken_bytes - space.ready_bytes == 8 * MIB
        assert running.extent(ino).exists()
        with pytest.raises(NoSpace):
            store.allocator.require_space(61 * MIB)
        assert store.reclaim.awaits_users
        assert not store.reclaim.hopeful
    store.allocator.require_space(64 * MIB)
    assert not running.extent(ino).exists()
    assert_exact(running)


def test_a_stop_removes_what_somebody_maps(running: Host) -> None:
    store = running.store
    ino = store_block(store, b"block")
    with running.extent(ino).open("rb"):
        store.namespace.unlink(ROOT_INODE, b"block")
        store.pool.recently_removed.give_way()
        store.pool.background.drain()
        running.stop()
        assert not running.extent(ino).exists()
    assert running.check().problems == []


def test_truncating_up_makes_room_for_what_will_be_written(running: Host) -> None:
    """But a length is no promise to write so much: of 64 MiB no more than 2 are made free."""
    store = running.store
    before = fill(store)
    opened, _ = store.blocks.create(ROOT_INODE, b"draft", FILE, 0, 0)
    left = names(store)
    assert store.pool.space.unclaimed_bytes == 0
    store.blocks.truncate(opened.ino, 5 * MIB)
    assert len(left - names(store)) == 1
    assert store.pool.space.unclaimed_bytes >= MIB
    for size_bytes in (1 << 40, 1 << 50):
        store.blocks.truncate(opened.ino, size_bytes)
    assert len(left - names(store)) == 1
    assert len(before) - len(left & set(before)) == 1
    store.blocks.close(opened, writer=True)
    assert_exact(running)


def test_statfs_counts_what_may_go_as_free(running: Host) -> None:
    store = running.store
    fill(store)
    assert store.totals().blocks_free == store.totals().blocks
    opened, _ = store.blocks.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(store, opened, b"x" * (8 * MIB))
    free = (store.totals().blocks - store.totals().blocks_free) * 4096
    assert free == 8 * MIB
    store.blocks.close(opened, writer=True)


def test_a_block_that_is_truncated_may_go_to_make_room_for_its_draft(running: Host) -> None:
    """The draft has the name then, and nothing of the block that went is counted twice."""
    store = running.store
    (oldest, *_), truncating = fill(store), store.blocks.truncating
    ino = store.namespace.lookup(ROOT_INODE, oldest)
    fresh = truncating.supersede(ino, store.namespace.record(ino), NOBODY, thread=7)
    assert store.reclaim.evicted_blocks >= 1
    assert store.namespace.lookup(ROOT_INODE, oldest) == fresh != ino
    store.blocks.close(store.blocks.open(fresh, writer=True, truncate=True, thread=7), writer=True)
    assert_exact(running)
