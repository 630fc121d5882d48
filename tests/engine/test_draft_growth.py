"""Drafts that grow without asking: accounted, kept room for, and stopped as the last resort."""

import os
from collections.abc import Iterator

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.types import ROOT_INODE
from tests.support.store.driven import AllocationRequest, Driven, Opened
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import (
    FILE,
    MIB,
    Host,
    allocate,
    assert_exact,
    host,
    make_directory,
    put,
    settle,
)


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        store = made.start()
        store.let_writers_run()
        settle(store)  # until then there may be blocks that could go
        yield made


def draft(store: Driven, name: bytes) -> Opened:
    """Make a draft that may take any amount, as passthrough lets it."""
    opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0)
    store.let_run(opened)
    return opened


def grow(opened: Opened, size_bytes: int) -> None:
    """Write past the daemon, as the kernel does."""
    os.pwrite(opened.fd, bytes(size_bytes), os.fstat(opened.fd).st_size)


def test_a_small_pool_lets_no_draft_of_unknown_size_run_free(running: Host) -> None:
    opened, _ = running.store.create(ROOT_INODE, b"a", FILE, 0, 0)
    assert opened.through_daemon
    running.store.close(opened, writer=True)


def test_the_first_draft_of_a_directory_runs_free_where_others_kept_to_their_size(
    running: Host,
) -> None:
    """What it inherits is reserved, and may be a tenth of what it writes at once."""
    courses = []
    for number in range(7):
        directory = make_directory(running, b"%d" % number)
        opened, _ = running.store.create(directory, b"a", FILE, 0, 0)
        courses.append("asks" if opened.through_daemon else "runs")
        grow(opened, MIB)
        running.store.close(opened, writer=True)
    assert courses == ["asks"] * 5 + ["runs"] * 2
    put(running.store, ROOT_INODE, b"larger", bytes(2 * MIB))
    opened, _ = running.store.create(make_directory(running, b"n"), b"a", FILE, 0, 0)
    assert opened.through_daemon
    running.store.close(opened, writer=True)


def test_drafts_that_their_writers_give_up_are_counted(running: Host) -> None:
    """Of those as large as their reserve: XFS refuses what lies beyond it, and nobody hears."""
    store = running.store
    for number in range(3):
        put(store, ROOT_INODE, b"%d" % number, bytes(MIB))
    counts = []
    for name, size_bytes in ((b"a.tmp", MIB), (b"b.tmp", MIB // 2), (b"c", 2 * MIB)):
        store.look_at_removal(put(store, ROOT_INODE, name, bytes(size_bytes)))
        store.unlink(ROOT_INODE, name)
        counts.append(store.drafts_given_up)
    assert counts == [1, 1, 1]
    store.let_writers_run(free=False)  # each of its writes asked
    store.look_at_removal(put(store, ROOT_INODE, b"d.tmp", bytes(4 * MIB)))
    assert store.drafts_given_up == 1


def test_what_a_draft_took_is_accounted_and_more_is_kept_for_it(running: Host) -> None:
    store = running.store
    opened = draft(store, b"a")
    grow(opened, 4 * MIB)
    store.watch(0.0)
    assert store.space.used_bytes == 4 * MIB
    assert store.space.lacking_bytes == 16 * MIB
    assert store.space.unclaimed_bytes == 44 * MIB
    store.close(opened, writer=True)
    store.watch(0.0)
    assert store.space.lacking_bytes == 0
    assert_exact(running)


def test_who_may_take_any_amount_is_looked_at_before_one_more_draft(running: Host) -> None:
    store = running.store
    free, asks = draft(store, b"free"), store.create(ROOT_INODE, b"asks", FILE, 0, 0)[0]
    assert asks.through_daemon
    grow(free, 2 * MIB)
    grow(asks, MIB)
    store.look_at_runners()
    assert store.space.used_bytes == 2 * MIB, "who asks accounts itself"
    reader = store.open(free.ino, writer=False, truncate=False)
    store.close(free, writer=True)
    assert store.runners == {}
    again = store.open(free.ino, writer=True, truncate=False, appends=True)
    grow(again, 2 * MIB)
    store.look_at_runners()
    assert store.space.used_bytes == 4 * MIB
    for opened, writer in ((reader, False), (again, True), (asks, True)):
        store.close(opened, writer=writer)
    assert_exact(running)


def test_of_many_only_some_are_looked_at_before_each_draft(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create costs the same beside ten writers and beside a thousand."""
    set_limit(monkeypatch, "looks_a_draft", 2)
    store = running.store
    drafts = [draft(store, b"%d" % number) for number in range(5)]
    for opened in drafts:
        grow(opened, MIB)
    first = next(iter(store.runners.values()))
    first.unreserved = False  # it runs no more, and is only forgotten
    for accounted in (1, 3, 4):
        store.look_at_runners()
        assert store.space.used_bytes == accounted * MIB
    assert store.runners.keys() == {opened.ino for opened in drafts if opened.unreserved}
    for opened in drafts:
        store.close(opened, writer=True)
    assert_exact(running)


def test_nobody_is_stopped_for_what_he_may_take_next(running: Host) -> None:
    """Four times 20 MiB are kept free for it; there is no more than 44, and nothing may go."""
    store = running.store
    fast = draft(store, b"fast")
    grow(fast, 20 * MIB)
    store.watch(0.0)
    assert store.space.unclaimed_bytes < 0
    assert not fast.overrun
    store.close(fast, writer=True)
    assert store.lookup(ROOT_INODE, b"fast") == fast.ino
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
def test_nobody_is_stopped_while_others_are_about_to_go(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = running.store
    greedy = draft(store, b"greedy")
    grow(greedy, 68 * MIB)
    soon = True
    store.pretend_hopeful(monkeypatch, lambda: soon)
    store.watch(0.0)
    assert not greedy.overrun
    soon = False
    store.watch(0.1)
    assert greedy.overrun
    store.close(greedy, writer=True)
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
def test_one_that_is_read_is_stopped_once_nobody_reads_it(running: Host) -> None:
    """Its reader would find a hole where bytes were."""
    store = running.store
    greedy = draft(store, b"greedy")
    reader = store.open(greedy.ino, writer=False, truncate=False)
    grow(greedy, 68 * MIB)
    store.watch(0.0)
    assert not greedy.overrun
    assert os.fstat(greedy.fd).st_size == 68 * MIB
    assert os.fstat(greedy.fd).st_blocks
    store.close(reader, writer=False)
    store.watch(0.1)
    assert greedy.overrun
    store.close(greedy, writer=True)
    assert_exact(running)


def test_of_very_many_each_has_its_turn(running: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick looks at some, and the next one at those behind them; after the last the first."""
    set_limit(monkeypatch, "looks a tick", 2)
    store = running.store
    drafts = [draft(store, b"%d" % number) for number in range(5)]
    for opened in drafts:
        grow(opened, MIB)
    for now_s, accounted in ((0.0, 2), (0.1, 4)):
        store.watch(now_s)
        assert store.space.used_bytes == accounted * MIB
    grow(drafts[0], MIB)
    store.watch(0.2)
    assert store.space.used_bytes == 6 * MIB, "the last one, and the first again"
    for opened in drafts:
        store.close(opened, writer=True)
    assert_exact(running)


def test_nothing_is_kept_ahead_of_who_asked_for_its_room(running: Host) -> None:
    store = running.store
    slab = draft(store, b"slab")
    allocate(store, slab, 8 * MIB)
    store.watch(0.0)
    assert store.space.lacking_bytes == 0
    assert store.space.unclaimed_bytes == 56 * MIB
    grow(slab, MIB)
    store.watch(0.1)
    assert store.space.lacking_bytes == 4 * MIB, "for what it takes beyond that"
    store.close(slab, writer=True)
    assert_exact(running)


def test_one_that_took_what_is_not_there_is_stopped_alone(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    store = running.store
    kept, greedy = draft(store, b"kept"), draft(store, b"greedy")
    grow(kept, 8 * MIB)
    store.watch(0.0)
    grow(greedy, 60 * MIB)
    store.watch(0.1)
    assert (greedy.overrun, kept.overrun) == (True, False)
    assert os.fstat(greedy.fd).st_blocks == 0
    grow(greedy, MIB)
    store.watch(0.2)
    assert os.fstat(greedy.fd).st_blocks == 0, "what it goes on writing goes, too"
    assert store.space.overcommitted_bytes == 0
    store.close(greedy, writer=True)
    store.close(kept, writer=True)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"greedy")
    assert store.lookup(ROOT_INODE, b"kept") == kept.ino
    settle(store)
    assert_exact(running)
    assert "outgrew the pool" in caplog.text


@pytest.mark.usefixtures("caplog")
def test_one_that_is_closed_before_the_next_look_is_stopped_too(running: Host) -> None:
    store = running.store
    greedy, kept = draft(store, b"greedy"), draft(store, b"kept")
    grow(kept, 60 * MIB)
    store.look_at_closing(kept)
    assert not kept.overrun
    store.close(kept, writer=True)
    grow(greedy, 8 * MIB)
    store.look_at_closing(greedy)
    assert greedy.overrun
    assert store.space.overcommitted_bytes == 0
    store.close(greedy, writer=True)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"greedy")
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
def test_a_slab_is_never_stopped(running: Host) -> None:
    """It asked for its room; and while it is allocated nobody counts its bytes twice."""
    store = running.store
    slab = draft(store, b"slab")
    allocation = store.begin_allocation(slab, AllocationRequest(0, 0, 40 * MIB))
    allocation.work(slab.fd)
    store.watch(0.0)
    assert store.space.unclaimed_bytes == 24 * MIB - store.space.lacking_bytes
    store.end_allocation(slab, allocation)
    allocate(store, slab, 40 * MIB)
    greedy = draft(store, b"greedy")
    grow(greedy, 30 * MIB)
    store.watch(0.1)
    assert (greedy.overrun, slab.overrun) == (True, False)
    assert os.fstat(slab.fd).st_blocks * 512 == 40 * MIB
    for opened in (slab, greedy):
        store.close(opened, writer=True)
    assert_exact(running)
