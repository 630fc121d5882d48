"""Eviction carried out: what may go, in which order, and that nothing else changes."""

import os
from collections.abc import Iterator

import pytest

from kvfs.core.errors import DeadInode, NoSpace, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    MIB,
    Host,
    assert_exact,
    get,
    host,
    settle,
    write,
)

CAPACITY_BYTES = 64 * MIB


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def store_block(
    store: Driven, name: bytes, size_bytes: int = 4 * MIB, parent: InodeNo = ROOT_INODE
) -> InodeNo:
    """Store a block as connectors do that publish: temporary name, rename."""
    opened, _ = store.create(parent, name + b".tmp", FILE, 0, 0)
    try:
        write(store, opened, name[:1] * size_bytes)
    finally:
        store.close(opened, writer=True)
    store.rename(parent, name + b".tmp", parent, name, replace=True)
    return opened.ino


def names(store: Driven, parent: InodeNo = ROOT_INODE) -> set[bytes]:
    return {name for _, name in store.children(parent, InodeNo(0))}


def fill(store: Driven, parent: InodeNo = ROOT_INODE) -> list[bytes]:
    """Fill the pool with blocks of 4 MiB, each in a burst of its own; return their names."""
    found = []
    for number in range(CAPACITY_BYTES // (4 * MIB)):
        name = b"%c%02d" % (97 + number, number)
        store_block(store, name, parent=parent)
        store.tick_heat(store.now_s() + 10 * number)
        found.append(name)
    return found


def test_the_oldest_goes_for_a_new_one(running: Host) -> None:
    store = running.store
    before = fill(store)
    store_block(store, b"new")
    assert names(store) == {b"new", *before[1:]}
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, before[0])
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
    small, _ = store.make_node(ROOT_INODE, b"small", DIRECTORY, 0, 0)
    store_block(store, b"first", 100, parent=small)
    before = fill(store)
    assert len(set(before) - names(store)) == 1
    for number in range(100):
        store_block(store, b"%d" % number, 100, parent=small)
    assert len(set(before) - names(store)) == 1
    assert store.evicted_blocks == 1
    assert_exact(running)


def test_the_parents_counts_and_times_follow(running: Host) -> None:
    store = running.store
    directory, _ = store.make_node(ROOT_INODE, b"d", DIRECTORY, 0, 0)
    fill(store, directory)
    before = store.directory(directory)
    store.evict(1)
    after = store.directory(directory)
    assert after.entries == before.entries - 1
    assert after.mtime_ns > before.mtime_ns
    settle(store)
    running.stop()
    assert running.check().problems == []


def test_what_is_open_for_reading_stays_while_others_can_go(running: Host) -> None:
    store = running.store
    before = fill(store)
    ino = store.lookup(ROOT_INODE, before[0])
    opened = store.open(ino, writer=False, truncate=False)
    fd = store.extent_fd(opened)
    for number in range(20):
        store_block(store, b"%d" % number)
    assert before[0] in names(store)
    assert os.pread(fd, 10, 0) == before[0][:1] * 10
    store.close(opened, writer=False)
    assert_exact(running)


def test_what_was_read_goes_in_its_turn_as_soon_as_that_is_done(running: Host) -> None:
    """Passed over once, it is no younger than those stored since."""
    store = running.store
    before = fill(store)
    opened = [
        store.open(store.lookup(ROOT_INODE, name), writer=False, truncate=False)
        for name in before[:4]
    ]
    store.turn_clock(lambda: 1e6)  # what a plan says holds all the while
    for number in range(14):
        store_block(store, b"others%d" % number)
    assert names(store) == {*before[:4], *(b"others%d" % number for number in range(2, 14))}
    for each in opened:
        store.close(each, writer=False)
    for number in range(4):
        store_block(store, b"last%d" % number)
    assert set(before) & names(store) == set()
    assert b"others2" in names(store)
    assert_exact(running)


def test_a_mapped_block_stays(running: Host) -> None:
    """The handle is closed, but somebody still has the extent (a mapping on passthrough)."""
    store = running.store
    before = fill(store)
    ino = store.lookup(ROOT_INODE, before[0])
    with running.extent(ino).open("rb"):
        for number in range(20):
            store_block(store, b"%d" % number)
        assert before[0] in names(store)
    assert_exact(running)


def test_what_belongs_to_a_living_process_stays(running: Host) -> None:
    store = running.store
    own = store.maker_of(os.getpid())
    leased = []
    for number in range(8):
        opened, _ = store.create(ROOT_INODE, b"leased%d" % number, FILE, 0, 0, own)
        write(store, opened, b"l" * (4 * MIB))
        store.close(opened, writer=True)
        leased.append(b"leased%d" % number)
    for number in range(30):
        store_block(store, b"%d" % number)
    assert set(leased) <= names(store)
    assert_exact(running)


def test_policies_and_pins_are_kept(running: Host) -> None:
    store = running.store
    kept, _ = store.make_node(ROOT_INODE, b"kept", DIRECTORY, 0, 0)
    first, _ = store.make_node(ROOT_INODE, b"first", DIRECTORY, 0, 0)
    store.set_xattr(kept, b"user.kvfs.evict", b"never")
    store.set_xattr(first, b"user.kvfs.evict", b"first")
    store_block(store, b"k", parent=kept)
    pinned = store_block(store, b"pinned")
    store.set_xattr(pinned, b"user.kvfs.pin", b"1")
    ordinary = store_block(store, b"ordinary")
    settle(store)
    store_block(store, b"f", parent=first)
    store.evict(1)
    assert names(store, first) == set()
    store.evict(CAPACITY_BYTES)
    assert names(store, kept) == {b"k"}
    assert b"pinned" in names(store)
    with pytest.raises(DeadInode):
        store.record(ordinary)
    assert_exact(running)


@pytest.mark.parametrize("walked", [True, False], ids=["ranked", "found by plans"])
def test_any_number_of_pinned_blocks_keeps_no_other_from_going(
    running: Host, walked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "plan_blocks", 2)
    set_limit(monkeypatch, "plan_refused", 3)
    store = running.store
    pinned, _ = store.make_node(ROOT_INODE, b"pinned", DIRECTORY, 0, 0)
    for number in range(12):  # longer than all rounds of a call can pass over
        store_block(store, b"%02d" % number, MIB, parent=pinned)
    store.set_xattr(pinned, b"user.kvfs.pin", b"1")
    if walked:
        settle(store)
    store_block(store, b"ordinary", MIB)
    for _ in range(1 if walked else 2):
        store.search_anew()  # as somebody does who waits
        store.evict(MIB)
    assert names(store) == {b"pinned"}
    assert len(names(store, pinned)) == 12
    assert_exact(running)


def test_what_may_go_is_told_without_the_pinned_and_with_all_others(running: Host) -> None:
    store = running.store
    pinned, _ = store.make_node(ROOT_INODE, b"pinned", DIRECTORY, 0, 0)
    for number in range(6):
        store_block(store, b"%02d" % number, parent=pinned)
    store.set_xattr(pinned, b"user.kvfs.pin", b"1")
    store_block(store, b"ordinary")
    settle(store)
    assert store.evictable_bytes == 4 * MIB
    free_bytes = store.totals().blocks_free * 4096
    assert free_bytes == CAPACITY_BYTES - 24 * MIB
    store_block(store, b"later", parent=pinned)
    assert store.evictable_bytes == 4 * MIB
    assert store.describe()["pinned_bytes"] == 28 * MIB
    for number in range(6):
        store.unlink(pinned, b"%02d" % number)
    assert store.evictable_bytes == 4 * MIB
    assert store.describe()["pinned_bytes"] == 4 * MIB
    assert store.pinned_bytes == 24 * MIB  # of when it was set
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
        opened, _ = store.create(ROOT_INODE, b"%d.tmp" % number, FILE, 0, 0)
        write(store, opened, b"x" * (21 * MIB))
        drafts.append(opened)
    with pytest.raises(NoSpace):
        write(store, drafts[0], b"x" * (2 * MIB), 21 * MIB)
    assert not store.hopeful
    for opened in drafts:
        store.close(opened, writer=True)
    assert names(store) == {b"1.tmp", b"2.tmp"}
    assert_exact(running)


def test_the_pool_names_the_directory_that_holds_its_space(running: Host) -> None:
    store = running.store
    assert store.describe()["warning"] is None
    directory, _ = store.make_node(ROOT_INODE, b"holder", DIRECTORY, 0, 0)
    opened, _ = store.create(directory, b"draft", FILE, 0, 0)
    write(store, opened, b"x" * (62 * MIB))
    assert "/holder" in store.describe()["warning"]
    store.close(opened, writer=True)
    assert store.describe()["leased_bytes"] == 62 * MIB


def test_a_failing_index_evicts_nothing_and_changes_nothing(
    running: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = running.store
    before = set(fill(store))

    def refuse(_txn: object) -> None:
        raise OSError(5, "Input/output error")

    store.fail_commit(monkeypatch, refuse)
    assert store.evict(MIB) == 0
    monkeypatch.undo()
    assert names(store) == before
    assert "nothing evicted" in caplog.text
    assert_exact(running)


def test_what_is_evicted_counts_until_it_is_off_the_device(running: Host) -> None:
    store = running.store
    fill(store)
    settle(store)
    taken_bytes = store.space.taken_bytes
    store.evict(4 * MIB)
    assert store.space.pending_delete_bytes == 4 * MIB
    assert store.space.taken_bytes == taken_bytes
    store.drain()
    assert store.space.pending_delete_bytes == 0
    assert_exact(running)


def test_what_somebody_maps_counts_until_he_is_done(running: Host) -> None:
    """Its name and its handle are gone, but its bytes would not come back with its extent."""
    store = running.store
    ino = store_block(store, b"block")
    store_block(store, b"other")
    settle(store)
    with running.extent(ino).open("rb"):
        store.unlink(ROOT_INODE, b"block")
        store.erase_removed()
        store.drain()
        space = store.space
        assert (space.pending_delete_bytes, space.deleted_open_bytes) == (0, 4 * MIB)
        assert space.taken_bytes - space.ready_bytes == 8 * MIB
        assert running.extent(ino).exists()
        with pytest.raises(NoSpace):
            store.require_space(61 * MIB)
        assert store.awaits_users
        assert names(store) == {b"other"}
    store.require_space(64 * MIB)
    assert not running.extent(ino).exists()
    assert_exact(running)


def test_a_stop_removes_what_somebody_maps(running: Host) -> None:
    store = running.store
    ino = store_block(store, b"block")
    with running.extent(ino).open("rb"):
        store.unlink(ROOT_INODE, b"block")
        store.erase_removed()
        store.drain()
        running.stop()
        assert not running.extent(ino).exists()
    assert running.check().problems == []


def test_truncating_up_makes_room_for_what_will_be_written(running: Host) -> None:
    """But a length is no promise to write so much: of 64 MiB no more than 2 are made free."""
    store = running.store
    before = fill(store)
    opened, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    left = names(store)
    assert store.space.unclaimed_bytes == 0
    store.truncate(opened.ino, 5 * MIB)
    assert len(left - names(store)) == 1
    assert store.space.unclaimed_bytes >= MIB
    for size_bytes in (1 << 40, 1 << 50):
        store.truncate(opened.ino, size_bytes)
    assert len(left - names(store)) == 1
    assert len(before) - len(left & set(before)) == 1
    store.close(opened, writer=True)
    assert_exact(running)


def test_statfs_counts_what_may_go_as_free(running: Host) -> None:
    store = running.store
    fill(store)
    assert store.totals().blocks_free == store.totals().blocks
    opened, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(store, opened, b"x" * (8 * MIB))
    free = (store.totals().blocks - store.totals().blocks_free) * 4096
    assert free == 8 * MIB
    store.close(opened, writer=True)


def test_a_block_that_is_truncated_may_go_to_make_room_for_its_draft(running: Host) -> None:
    """The draft has the name then, and nothing of the block that went is counted twice."""
    store = running.store
    oldest, *_ = fill(store)
    ino = store.lookup(ROOT_INODE, oldest)
    fresh = store.supersede(ino, thread=7)
    assert store.evicted_blocks >= 1
    assert store.lookup(ROOT_INODE, oldest) == fresh != ino
    store.close(store.open(fresh, writer=True, truncate=True, thread=7), writer=True)
    assert_exact(running)
