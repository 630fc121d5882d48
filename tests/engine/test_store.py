"""The store's promises, one by one, on a pool in memory and without a kernel mount."""

import dataclasses
import os
import stat
import struct

import pytest

from kvfs.core.errors import (
    Damaged,
    DeadInode,
    NoSpace,
    NotFound,
    ReadOnly,
    TooLarge,
)
from kvfs.core.lifecycle import State
from kvfs.core.records import IS_SLAB
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, round_up
from tests.support.store.stores import (
    FILE,
    MIB,
    SYMLINK,
    Host,
    assert_exact,
    get,
    make_directory,
    names,
    put,
    settle,
    tree,
    write,
)

# ---- a block's life ----


def test_a_draft_is_published_at_its_last_close(running: Host) -> None:
    store = running.store
    opened, record = store.create(ROOT_INODE, b"a", FILE, 7, 8)
    assert (record.state, record.uid, record.gid) == (State.DRAFT, 7, 8)
    write(store, opened, b"x" * 5000)
    assert store.present(opened.ino).size_bytes == 5000
    assert store.record(opened.ino).size_bytes == 0
    store.close(opened, writer=True)
    published = store.record(opened.ino)
    assert (published.state, published.size_bytes) == (State.LEASED, 5000)
    assert published.allocated_bytes == round_up(5000)
    assert get(store, ROOT_INODE, b"a") == b"x" * 5000
    assert_exact(running)


def test_a_published_block_says_what_it_is(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"tmp", b"bytes")
    running.store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"final")
    settle(running.store)
    identity = running.store.identity(ino)
    record = running.store.record(ino)
    assert identity is not None
    assert (identity.name, identity.size_bytes) == (b"final", 5)
    assert identity.sequence == record.sequence


def test_an_empty_file_holds_no_blocks(running: Host) -> None:
    put(running.store, ROOT_INODE, b"large", b"x" * MIB)
    ino = put(running.store, ROOT_INODE, b"empty", b"")
    assert running.store.record(ino).allocated_bytes == 0
    assert running.allocated_bytes(ino) == 0
    assert_exact(running)


def test_what_was_reserved_too_much_goes_back_at_the_close(running: Host) -> None:
    put(running.store, ROOT_INODE, b"large", b"x" * MIB)
    opened, _ = running.store.create(ROOT_INODE, b"small", FILE, 0, 0)
    assert opened.allocated_bytes == MIB
    write(running.store, opened, b"y" * 100)
    running.store.close(opened, writer=True)
    assert running.allocated_bytes(opened.ino) == PAGE_BYTES
    assert_exact(running)


def test_a_reserve_takes_no_more_than_half_of_what_is_free(running: Host) -> None:
    put(running.store, ROOT_INODE, b"large", b"x" * (24 * MIB))
    opened, _ = running.store.create(ROOT_INODE, b"next", FILE, 0, 0)
    assert opened.allocated_bytes == 0
    running.store.close(opened, writer=True)


def test_a_huge_sparse_file_reserves_nothing_for_the_next_one(running: Host) -> None:
    opened, _ = running.store.create(ROOT_INODE, b"sparse", FILE, 0, 0)
    running.store.truncate(opened.ino, 1 << 50)
    running.store.close(opened, writer=True)
    assert running.store.record(opened.ino).size_bytes == 1 << 50
    opened, _ = running.store.create(ROOT_INODE, b"next", FILE, 0, 0)
    assert opened.allocated_bytes == 0
    running.store.close(opened, writer=True)
    assert_exact(running)


def test_two_writers_publish_once_the_second_is_done(running: Host) -> None:
    store = running.store
    first, _ = store.create(ROOT_INODE, b"a", FILE, 0, 0)
    second = store.open(first.ino, writer=True, truncate=False)
    assert second is first
    write(store, first, b"one")
    store.close(first, writer=True)
    assert store.record(first.ino).state == State.DRAFT
    write(store, second, b"two", 3)
    store.close(second, writer=True)
    assert get(store, ROOT_INODE, b"a") == b"onetwo"


def test_an_open_for_writing_marks_a_published_block(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"old")
    settle(store)
    opened = store.open(ino, writer=True, truncate=False)
    assert store.record(ino).state == State.REWRITE
    settle(store)
    assert store.identity(ino) is None
    write(store, opened, b"new and longer")
    store.close(opened, writer=True)
    settle(store)
    assert store.record(ino).state == State.REWRITTEN
    identity = store.identity(ino)
    assert identity is not None
    assert identity.flags & IS_SLAB
    assert_exact(running)


@pytest.mark.parametrize("writes", [False, True])
def test_a_whole_block_can_still_be_opened_when_its_writer_was_faster(
    running: Host, writes: bool
) -> None:
    """Who looked the name up before it was replaced opens the old block, unless it was changed."""
    store = running.store
    ino = put(store, ROOT_INODE, b"block", b"bytes")
    opened = store.open(ino, writer=True, truncate=False)
    put(store, ROOT_INODE, b"tmp", b"newer")
    store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"block", replace=True)
    if writes:
        write(store, opened, b"other")
    store.close(opened, writer=True)
    if writes:
        with pytest.raises(DeadInode):
            store.open_to_read(ino)
    else:
        store.close(store.open_to_read(ino), writer=False)
    settle(store)
    assert_exact(running)


def test_a_taken_identity_is_remembered_until_it_can_do_no_harm(running: Host) -> None:
    """Until an fsync, a new one, or the end of the inode."""
    store = running.store
    kept, synced, removed = (put(store, ROOT_INODE, name, b"bytes") for name in (b"a", b"b", b"c"))
    store.sync()
    opened = store.open(kept, writer=True, truncate=False, appends=True)
    store.close(opened, writer=True)
    opened = store.open(synced, writer=True, truncate=False)
    store.truncate(removed, 2 * PAGE_BYTES)
    assert all(map(store.was_identified, (kept, synced, removed)))
    store.forget_durably(opened)
    store.close(opened, writer=True)
    store.hurry()
    store.unlink(ROOT_INODE, b"c")
    settle(store)
    assert not any(map(store.was_identified, (kept, synced, removed)))


def test_rewriting_within_a_tick_of_the_clock_is_noticed(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"old")
    before = store.record(ino)
    opened = store.open(ino, writer=True, truncate=False)
    write(store, opened, b"new")
    os.utime(opened.fd, ns=(before.atime_ns, before.mtime_ns))
    store.close(opened, writer=True)
    assert store.record(ino).sequence > before.sequence


def test_truncating_an_open_reader_keeps_the_accounts_right(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x" * 100_000)
    reader = store.open(ino, writer=False, truncate=False)
    store.truncate(ino, 0)
    second = store.open(ino, writer=True, truncate=False)
    store.close(second, writer=True)
    assert_exact(running)
    store.close(reader, writer=False)
    assert_exact(running)
    assert store.space.used_bytes == 0


@pytest.mark.parametrize("size_bytes", [0, 1, PAGE_BYTES, (1 << 63) - 1])
def test_truncate_costs_nothing(running: Host, size_bytes: int) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    running.store.truncate(ino, size_bytes)
    assert running.store.present(ino).size_bytes == size_bytes
    assert running.store.space.used_bytes <= PAGE_BYTES
    assert_exact(running)


def test_truncate_beyond_what_a_file_can_be_is_refused(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    with pytest.raises(TooLarge):
        running.store.truncate(ino, 1 << 63)


# ---- attributes ----


def test_attributes_of_a_removed_open_inode_bring_nothing_back(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x")
    opened = store.open(ino, writer=False, truncate=False)
    store.unlink(ROOT_INODE, b"a")
    changed = store.change(ino, mode=0o600, mtime_ns=5)
    assert (stat.S_IMODE(changed.mode), changed.mtime_ns) == (0o600, 5)
    store.set_xattr(ino, b"user.a", b"1")
    assert store.xattr(ino, b"user.a") == b"1"
    with pytest.raises(DeadInode):
        store.set_xattr(ino, b"user.kvfs.pin", b"1")
    assert store.row(ino) is None
    store.close(opened, writer=False)
    running.stop()
    assert running.check().problems == []


def test_times_survive_a_reopening_for_writing(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x")
    store.change(ino, mtime_ns=1_000_000_000)
    opened = store.open(ino, writer=True, truncate=False)
    assert store.present(ino).mtime_ns == 1_000_000_000
    store.close(opened, writer=True)
    assert store.record(ino).mtime_ns == 1_000_000_000


# ---- bounds ----


def test_writers_get_no_space_at_the_capacity_and_not_before(running: Host) -> None:
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"a", FILE, 0, 0)
    write(store, opened, b"x" * (64 * MIB))
    store.close(opened, writer=True)
    with pytest.raises(NoSpace):
        store.create(ROOT_INODE, b"b", FILE, 0, 0)
    store.unlink(ROOT_INODE, b"a")
    put(store, ROOT_INODE, b"b", b"y" * (63 * MIB))
    assert_exact(running)


def test_a_draft_that_was_refused_room_does_not_stay(running: Host) -> None:
    """What was written before is not whole: nobody may take it for the block."""
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"a", FILE, 0, 0)
    write(store, opened, b"x" * (63 * MIB))
    with pytest.raises(NoSpace):
        write(store, opened, b"x" * (2 * MIB), 63 * MIB)
    store.close(opened, writer=True)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"a")
    settle(store)
    assert store.space.taken_bytes == store.space.ready_bytes
    assert_exact(running)


def test_a_block_without_its_extent_becomes_a_miss(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x")
    running.extent(ino).unlink()
    opened = store.open(ino, writer=False, truncate=False)
    with pytest.raises(Damaged):
        store.extent_fd(opened)
    store.close(opened, writer=False)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"a")


def test_a_writer_of_a_block_without_its_extent_hears_so(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"a", b"x")
    running.extent(ino).unlink()
    with pytest.raises(Damaged):
        store.open(ino, writer=True, truncate=False)
    assert ino not in store.open_inos


def test_read_only_writes_nothing(running: Host) -> None:
    put(running.store, ROOT_INODE, b"a", b"x")
    running.stop()
    before = {path: path.stat().st_mtime_ns for path in running.path.rglob("*")}
    store = running.start(settings=running.read_only())
    assert get(store, ROOT_INODE, b"a") == b"x"
    for change in (
        lambda: store.create(ROOT_INODE, b"b", FILE, 0, 0),
        lambda: store.unlink(ROOT_INODE, b"a"),
        lambda: store.open(store.lookup(ROOT_INODE, b"a"), writer=True,
                                  truncate=False),
    ):  # fmt: skip
        with pytest.raises(ReadOnly):
            change()
    store.tick()
    running.stop()
    assert {path: path.stat().st_mtime_ns for path in running.path.rglob("*")} == before


# ---- stop and start ----


def test_a_clean_stop_and_start_keep_everything(running: Host) -> None:
    store = running.store
    a = make_directory(running, b"a")
    ino = put(store, a, b"block", b"x" * 12_345)
    store.make_node(a, b"link", SYMLINK, 1, 2, b"../target")
    store.set_xattr(ino, b"user.k", b"v")
    before, kept = tree(store), store.record(ino)
    running.stop()
    assert running.check().problems == []
    store = running.start()
    assert store.swept
    assert tree(store) == before
    assert store.record(ino)._replace(ctime_ns=0) == kept._replace(ctime_ns=0)
    assert store.xattr(ino, b"user.k") == b"v"
    assert_exact(running)


def test_a_clean_stop_drops_what_is_being_written(running: Host) -> None:
    opened, _ = running.store.create(ROOT_INODE, b"a", FILE, 0, 0)
    write(running.store, opened, b"so far")
    running.store.open(opened.ino, writer=False, truncate=False)
    running.stop()
    assert running.check().problems == []
    running.start()
    assert names(running) == []


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("torn", [True, False])
def test_a_stop_after_the_last_close_keeps_what_was_closed(
    running: Host, flushed: bool, torn: bool
) -> None:
    """Only the RELEASE was lost; a close that nobody heard of may have been after an abort."""
    opened, _ = running.store.create(ROOT_INODE, b"a", FILE, 0, 0)
    write(running.store, opened, b"whole")
    opened.flushed = flushed
    if torn:
        opened.tear()
    running.stop(all_closed=True)
    assert running.check().problems == []
    running.start()
    assert names(running) == ([b"a"] if flushed and not torn else [])


def test_inode_numbers_are_never_given_out_again(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    first = put(running.store, ROOT_INODE, b"a", b"x")
    running.store.unlink(ROOT_INODE, b"a")
    running.kill()
    assert put(running.start(), ROOT_INODE, b"a", b"x") > first


def test_a_change_that_cannot_be_packed_changes_nothing_and_ends(running: Host) -> None:
    store = running.store
    before = store.counters
    with pytest.raises(struct.error), store.count_anew(before._replace(blocks=-1)):
        pass
    assert store.counters == before
    with store.count_anew(before):
        pass


def test_the_sizes_of_so_many_directories_are_remembered(running: Host) -> None:
    """Who is forgotten gets no reserve, as one that never stored anything."""
    running.stop()
    settings = dataclasses.replace(running.settings, demand_directories_max=2)
    store = running.start(settings=settings)
    parents = [make_directory(running, name) for name in (b"a", b"b", b"c")]
    for number, parent in enumerate(parents, 1):
        put(store, parent, b"K", b"x" * (number * MIB))
    drafts = [store.create(parent, b"L", FILE, 0, 0)[0] for parent in parents]
    assert [opened.allocated_bytes for opened in drafts] == [0, 2 * MIB, 3 * MIB]
    for opened in drafts:
        store.close(opened, writer=True)


def test_so_many_extents_wait_to_be_unlinked(running: Host) -> None:
    running.stop()
    settings = dataclasses.replace(running.settings, unlink_queue_max=3)
    store = running.start(settings=settings)
    inos = [put(store, ROOT_INODE, b"%d" % number, b"x") for number in range(20)]
    settle(store)
    for number in range(20):
        store.unlink(ROOT_INODE, b"%d" % number)
    store.erase_removed()
    assert sum(running.extent(ino).exists() for ino in inos) <= 3
    settle(store)
    assert_exact(running)
