"""What a store makes of handles that outlived another one: drafts, readers, closes in doubt."""

import os
import signal
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import DeadInode, NotFound
from kvfs.core.lifecycle import SETTLED, State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import NOBODY, Maker
from tests.support.store.driven import LivingHandle, Opened
from tests.support.store.stores import (
    FILE,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    put,
    settle,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")
#: A process that nobody can look at.
WRITER: Final = Maker(1 << 30, 77)
BYTES: Final = bytes(range(256)) * 64


@pytest.fixture
def running() -> Iterator[Host]:
    """A pool in memory with a running store, which may be taken over; in the end all is counted."""
    with host() as made:
        made.start_outliving()
        yield made
        assert_exact(made)
        settle(made.store)
        assert_exact(made)
        assert_no_strays(made.store)
        made.stop()
        assert made.check().problems == []
        made.forget_outliving()


def reader(opened: Opened) -> LivingHandle:
    """Return a handle that reads."""
    return LivingHandle(opened.ino, writer=False)


def writer(opened: Opened, maker: Maker = NOBODY) -> LivingHandle:
    """Return a handle that writes."""
    return LivingHandle(opened.ino, writer=True, maker=maker, thread=os.getpid())


def test_a_draft_goes_on_being_written(running: Host) -> None:
    """Its rows were in no commit."""
    draft, _ = running.store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(running.store, draft, BYTES)
    store = running.take_over(writer(draft))
    assert store.lookup(ROOT_INODE, b"draft") == draft.ino
    assert store.present(draft.ino).size_bytes == len(BYTES)
    again = store.opened(draft.ino)
    os.pwrite(store.extent_fd(again), BYTES, len(BYTES))
    store.close(again, writer=True)
    assert store.record(draft.ino).size_bytes == 2 * len(BYTES)
    assert store.record(draft.ino).state != State.DRAFT
    settle(store)
    assert_exact(running)


def test_a_truncation_that_was_under_way_loses_nothing(running: Host) -> None:
    """[taken-over] The server was killed inside it; the kernel sends the request again."""
    ino = put(running.store, ROOT_INODE, b"block", BYTES)
    own = running.store.open(ino, writer=True, truncate=False)
    os.ftruncate(running.store.extent_fd(own), 100)
    store = running.take_over()
    assert store.lookup(ROOT_INODE, b"block") == ino
    store.truncate(ino, 100)
    assert get(store, ROOT_INODE, b"block") == BYTES[:100]
    settle(store)
    assert_exact(running)


def test_a_draft_that_nobody_has_open_is_dropped(running: Host) -> None:
    draft, _ = running.store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    other, _ = running.store.create(ROOT_INODE, b"other", FILE, 0, 0)
    write(running.store, draft, BYTES)
    store = running.take_over(writer(other))
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"draft")
    store.close(store.opened(other.ino), writer=True)
    settle(store)
    assert_no_strays(store)


def test_a_removed_block_keeps_its_bytes_for_who_reads_it(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"block", BYTES)
    running.store.set_xattr(ino, b"user.a", b"1")
    opened = running.store.open_to_read(ino)
    running.store.unlink(ROOT_INODE, b"block")
    for _ in range(2):
        store = running.take_over(reader(opened))
        settle(store)
        assert os.pread(store.extent_fd(store.opened(ino)), len(BYTES), 0) == BYTES
        assert store.present(ino).size_bytes == len(BYTES)
        assert store.xattr(ino, b"user.a") == b"1"
    store.close(store.opened(ino), writer=False)
    settle(store)
    with pytest.raises(DeadInode):
        store.record(ino)


def test_a_block_removed_a_moment_ago_can_still_be_opened(running: Host) -> None:
    """The LOOKUP was answered by the last server, and the OPEN is on its way."""
    ino = put(running.store, ROOT_INODE, b"block", BYTES)
    put(running.store, ROOT_INODE, b"new", b"new")
    running.store.rename(ROOT_INODE, b"new", ROOT_INODE, b"block")
    store = running.take_over()
    opened = store.open_to_read(ino)
    assert os.pread(store.extent_fd(opened), len(BYTES), 0) == BYTES
    store.close(opened, writer=False)


def test_a_close_in_doubt_stays_in_doubt(running: Host) -> None:
    """Its RELEASE was answered, and its writer's fate is not known yet."""
    store = running.store
    draft, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0, WRITER)
    write(store, draft, BYTES)
    closing = store.last_flush(draft, Fate.UNKNOWN, 100, WRITER)
    store.close(draft, writer=True, closing=closing)
    store = running.take_over()
    assert store.record(draft.ino).state == State.DRAFT
    store.rename(ROOT_INODE, b"draft", ROOT_INODE, b"block")
    store.tick()
    assert store.record(draft.ino).size_bytes == len(BYTES)
    assert store.open_inos == set()


def test_a_close_that_awaits_its_rename_is_carried_out_with_it(running: Host) -> None:
    """Its RELEASE was answered; the rename comes to the next server."""
    draft, _ = running.store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0)
    write(running.store, draft, BYTES)
    running.store.close(draft, writer=True, awaits_rename=True)
    store = running.take_over()
    assert_exact(running)
    store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K")
    store.tick()
    assert store.record(draft.ino).state in SETTLED
    assert get(store, ROOT_INODE, b"K") == BYTES
    assert store.open_inos == set()


@pytest.mark.parametrize("comes", [False, True])
def test_a_truncating_open_is_awaited_on(running: Host, *, comes: bool) -> None:
    """Its LOOKUP was answered with a fresh inode, and its OPEN comes to the next server, or not."""
    ino, thread = put(running.store, ROOT_INODE, b"K", BYTES), os.getpid()
    fresh = running.store.supersede(ino, thread)
    before = running.store.space
    store = running.take_over()
    assert store.space.used_bytes == before.used_bytes
    if comes:
        opened = store.open(fresh, writer=True, truncate=True, thread=thread)
        write(store, opened, b"new")
        store.close(opened, writer=True)
        assert get(store, ROOT_INODE, b"K") == b"new"
    else:
        store.end_second_tries()
        with pytest.raises(NotFound):
            store.lookup(ROOT_INODE, b"K")


def test_a_block_that_is_rewritten_goes_on_being_rewritten(running: Host) -> None:
    """What it holds is counted, and a kill of the next server finds it unfinished."""
    ino = put(running.store, ROOT_INODE, b"K", BYTES)
    running.store.sync()
    own = running.store.open(ino, writer=True, truncate=False)
    store = running.take_over(writer(own))
    assert_exact(running)
    again = store.opened(ino)
    write(store, again, b"new" * 10_000)
    assert store.unfinished() == {ino}
    store.close(again, writer=True)
    assert get(store, ROOT_INODE, b"K") == (b"new" * 10_000)[: max(len(BYTES), 30_000)]


def test_an_identity_that_was_removed_just_before_is_forgotten_durably(running: Host) -> None:
    """The last server may have been killed before its fsync: whoever writes next waits for one."""
    ino = put(running.store, ROOT_INODE, b"K", BYTES)
    running.store.sync()
    own = running.store.open(ino, writer=True, truncate=False)
    store = running.take_over(writer(own))
    again = store.opened(ino)
    assert store.must_forget(again)
    store.forget_durably(again)
    assert not store.must_forget(again)
    store.close(again, writer=True)


@pytest.mark.parametrize("appends", [False, True])
def test_who_only_appends_is_known_to(running: Host, *, appends: bool) -> None:
    """O_TRUNC by another empties what is only appended to, and else leads to a fresh inode."""
    ino = put(running.store, ROOT_INODE, b"log", BYTES)
    own = running.store.open(ino, writer=True, truncate=False, appends=appends)
    store = running.take_over(writer(own)._replace(appends=appends))
    assert store.opened(ino).is_shared_with(WRITER, 100, temporary=False) == appends
    store.close(store.opened(ino), writer=True, appends=appends)


@pytest.mark.parametrize("flushed", [False, True])
def test_a_stop_whose_releases_were_lost_keeps_what_was_closed(
    running: Host, *, flushed: bool
) -> None:
    """By the last server: what it wrote is whole if its descriptor was closed."""
    draft, _ = running.store.create(ROOT_INODE, b"K", FILE, 0, 0)
    write(running.store, draft, BYTES)
    status = os.fstat(draft.fd)
    as_closed = (status.st_size, status.st_mtime_ns)
    handle = writer(draft)._replace(flushed=flushed, flushed_as=as_closed)
    running.take_over(handle)
    running.stop(all_closed=True)
    store = running.start()
    if flushed:
        assert get(store, ROOT_INODE, b"K") == BYTES
    else:
        with pytest.raises(NotFound):
            store.lookup(ROOT_INODE, b"K")


@pytest.mark.parametrize("passing", [False, True])
def test_the_handles_of_file_servers_are_theirs(running: Host, *, passing: bool) -> None:
    """They keep no block from eviction, unless the kernel has its bytes."""
    ino = put(running.store, ROOT_INODE, b"K", BYTES)
    running.store.rename(ROOT_INODE, b"K", ROOT_INODE, b"block")
    own = running.store.open_served(ino, writer=False, passing=passing)
    store = running.take_over(reader(own)._replace(served=True, passing=passing, opens=2))
    again = store.opened(ino)
    assert (again.readers, again.served_readers) == (2, 2)
    assert again.is_revocable != passing
    for _ in range(2):
        store.close_served(again, writer=False, passing=passing)


def test_notes_of_what_nobody_writes_any_more_are_dropped(running: Host) -> None:
    """The server was killed between the last step of a close and the end of its note."""
    store = running.store
    draft, _ = store.create(ROOT_INODE, b"K", FILE, 0, 0)
    write(store, draft, BYTES)
    store.close(draft, writer=True)
    store.leave_note_of(draft)
    assert store.noted_writers() == {draft.ino}
    store = running.take_over()
    assert store.noted_writers() == set()
    assert get(store, ROOT_INODE, b"K") == BYTES


def test_what_lost_its_name_long_ago_goes_once_nobody_reads_it(running: Host) -> None:
    """Its reader closed it while there was no server."""
    ino = put(running.store, ROOT_INODE, b"K", BYTES)
    running.store.set_calendar(-1)
    running.store.open_to_read(ino)
    running.store.unlink(ROOT_INODE, b"K")
    store = running.take_over()
    store.drain()
    assert not running.extent(ino).exists()


def test_the_holes_of_a_draft_are_known_to_be_room_that_it_may_take(running: Host) -> None:
    draft, _ = running.store.create(ROOT_INODE, b"K", FILE, 0, 0)
    write(running.store, draft, BYTES, 1 << 20)
    expected = running.store.growth_bytes(draft, 8192, 8192)
    store = running.take_over(writer(draft))
    assert store.growth_bytes(store.opened(draft.ino), 8192, 8192) == expected == 8192
    write(store, store.opened(draft.ino), BYTES)
    assert_exact(running)
    store.close(store.opened(draft.ino), writer=True)


def test_a_block_that_was_taken_over_and_closed_leaves_no_note(running: Host) -> None:
    """Else each take-over would add to the table, and the next one would take it for open."""
    draft, _ = running.store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(running.store, draft, BYTES)
    running.store.rename(ROOT_INODE, b"draft", ROOT_INODE, b"block")
    store = running.take_over(writer(draft))
    assert store.noted_writers() == {draft.ino}
    store.close(store.opened(draft.ino), writer=True)
    assert store.noted_writers() == set()
    assert get(store, ROOT_INODE, b"block") == BYTES


def test_a_request_that_was_kept_just_before_the_kill_is_done(running: Host) -> None:
    """Its rows are in the journal, and the list of requests does not have it yet."""
    running.stop()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # a server that is killed: nothing of it is closed
        try:
            draft, _ = running.start_outliving().create(ROOT_INODE, b"K", FILE, 0, 0, request=77)
            running.forget_requests()
            os.write(writing, b"%d" % draft.ino)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    with open(reading, "rb") as told:
        ino = InodeNo(int(told.read()))
    os.waitpid(child, 0)
    store = running.start_after_kill(LivingHandle(ino, writer=True, thread=os.getpid()))
    assert store.requests_done() == {77: ino}
    store.close(store.opened(ino), writer=True)


def test_a_handle_of_what_is_gone_is_stale(running: Host) -> None:
    store = running.take_over(LivingHandle(InodeNo(77), writer=False))
    with pytest.raises(DeadInode):
        store.extent_fd(store.opened(InodeNo(77)))
    store.close(store.opened(InodeNo(77)), writer=False)
    assert store.open_inos == set()


def test_a_draft_that_a_successor_kept_is_dropped_by_a_start_without_handles(
    running: Host,
) -> None:
    draft, _ = running.store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    write(running.store, draft, BYTES)
    running.take_over(writer(draft))
    running.kill()
    store = running.start()
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"draft")
