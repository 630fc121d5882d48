"""A file server empties a whole block: nobody else finds less than a whole one from then on."""

import os
import time
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import DeadInode, NoSpace, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import NOBODY, SERVER, Maker
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.kernel.kernel_recorder import KernelRecorder
from tests.support.store.stores import (
    FILE,
    Host,
    allocate,
    assert_exact,
    get,
    host,
    names,
    put,
    settle,
    write,
)

OLD: Final = b"o" * 9000
NEW: Final = b"n" * 20_000
LOCAL: Final = Maker(os.getpid(), 1)
#: More than ``file_server_close_s``, less than ``lease_s``.
LATER_S: Final = 10.0


@pytest.fixture
def kernel() -> KernelRecorder:
    return KernelRecorder()


@pytest.fixture
def running(kernel: KernelRecorder) -> Iterator[Host]:
    with host() as made:
        made.start(kernel=kernel)
        yield made


def state(running: Host, name: bytes = b"K") -> State | None:
    """Return the state of what has *name*, None for a miss."""
    try:
        return State(running.store.record(running.store.lookup(ROOT_INODE, name)).state)
    except NotFound:
        return None


def seen_by(running: Host, ino: InodeNo, who: Maker) -> bool:
    """Whether *who* finds *ino* by its name."""
    return running.store.seen(ino, running.store.record(ino), who) == ino


def assert_hidden(running: Host, ino: InodeNo) -> None:
    """Only servers find it, by its name and by what the kernel remembers."""
    store = running.store
    assert state(running) is State.DRAFT
    assert seen_by(running, ino, SERVER)
    for who in (LOCAL, NOBODY):
        assert not seen_by(running, ino, who)
        for writer in (False, True):
            with pytest.raises(DeadInode):
                store.open(ino, writer=writer, truncate=False, maker=who)
    assert not store.trusts_name(store.record(ino), just_created=False)


def turn_clocks(running: Host, wait_s: float = LATER_S) -> None:
    """Let *wait_s* go by."""
    running.store.turn_clock(lambda: time.monotonic() + wait_s)
    running.store.let_days_pass(wait_s / 86_400)


def tick_later(running: Host) -> None:
    turn_clocks(running)
    running.store.tick()


def emptied(running: Host) -> InodeNo:
    """Store K, published, and have a server that holds nothing empty it."""
    ino = put(running.store, ROOT_INODE, b"K.tmp", OLD)
    running.store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K")
    running.store.truncate(ino, 0, SERVER)
    return ino


def test_it_is_hidden_until_the_server_has_written_and_closed_it(
    running: Host, kernel: KernelRecorder
) -> None:
    """[life-server-empties] And the kernel forgets the name at once, which it keeps for an hour."""
    store, ino = running.store, emptied(running)
    assert kernel.names == [b"K"]
    assert store.present(ino).size_bytes == 0
    assert_hidden(running, ino)
    assert store.known_from_before(ino)
    assert_exact(running)
    opened = store.open_served(ino, writer=True)
    write(store, opened, NEW[:5000])
    assert_hidden(running, ino)
    write(store, opened, NEW[5000:], 5000)
    store.close_served(opened, writer=True)
    assert state(running) is State.LEASED
    assert seen_by(running, ino, LOCAL)
    assert get(store, ROOT_INODE, b"K") == NEW
    assert store.open_inos == set()
    assert_exact(running)


def test_the_server_may_have_it_open_already(running: Host) -> None:
    """[life-server-empties] Ganesha keeps it open for ever: it is closed when nobody writes."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)
    opened = store.open_served(ino, writer=True)
    store.truncate(ino, 0, SERVER)
    assert_hidden(running, ino)
    write(store, opened, NEW)
    store.tick()
    assert_hidden(running, ino)
    tick_later(running)
    assert state(running) is State.LEASED
    assert get(store, ROOT_INODE, b"K") == NEW
    store.close_served(opened, writer=True)
    assert store.open_inos == set()
    assert_exact(running)


def test_a_server_that_was_counted_as_closed_empties_it(running: Host) -> None:
    """By the handle that it still has, and keeps."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)
    opened = store.open_served(ino, writer=True)
    tick_later(running)
    assert opened.quiet_writers == 1
    store.truncate(ino, 0, SERVER)
    assert_hidden(running, ino)
    write(store, opened, NEW)
    turn_clocks(running, 2 * LATER_S)
    store.tick()
    assert get(store, ROOT_INODE, b"K") == NEW
    store.close_served(opened, writer=True)
    assert store.open_inos == set()
    assert_exact(running)


def test_an_open_that_empties_does_the_same(running: Host) -> None:
    """By a handle: open_by_handle_at(2) with O_TRUNC, whose second try has no name either."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)
    with pytest.raises(DeadInode):
        store.open(ino, writer=True, truncate=True, maker=SERVER, thread=7)
    opened = store.open(ino, writer=True, truncate=True, maker=SERVER, thread=7)
    assert_hidden(running, ino)
    write(store, opened, NEW)
    store.close(opened, writer=True)
    assert_hidden(running, ino)  # whose handle it was the facade did not say
    tick_later(running)
    assert get(store, ROOT_INODE, b"K") == NEW


def test_a_close_without_a_byte_proves_nothing(running: Host) -> None:
    """Servers open it only to empty it: the client's bytes are still to come."""
    store, ino = running.store, emptied(running)
    store.close_served(store.open_served(ino, writer=True), writer=True)
    assert_hidden(running, ino)
    opened = store.open_served(ino, writer=True)
    write(store, opened, NEW)
    store.close_served(opened, writer=True)
    assert get(store, ROOT_INODE, b"K") == NEW


def test_what_nobody_writes_is_empty_after_a_while(running: Host) -> None:
    """[life-server-empties] As `truncate -s 0` means it."""
    ino = emptied(running)
    running.store.tick()
    assert_hidden(running, ino)
    tick_later(running)
    assert state(running) is State.LEASED
    assert get(running.store, ROOT_INODE, b"K") == b""
    assert running.store.open_inos == set()
    assert_exact(running)


def test_a_second_client_that_reads_sees_it_grow(running: Host) -> None:
    """[life-server-empties] It comes by the same server: nobody can tell the two apart."""
    store, ino = running.store, emptied(running)
    reader = store.open_served(ino, writer=False)
    assert not store.known_from_before(InodeNo(ino + 1))
    store.close_served(reader, writer=False)
    assert_hidden(running, ino)


def test_a_rename_shows_it(running: Host) -> None:
    """[life-server-empties] Though the server never closes it."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K.tmp", OLD)
    opened = store.open_served(ino, writer=True)
    store.truncate(ino, 0, SERVER)
    write(store, opened, NEW)
    store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K", who=SERVER)
    print("STATE", state(running))
    assert state(running) in (State.RENAMED, State.PUBLISHED)
    assert seen_by(running, ino, LOCAL)
    assert get(store, ROOT_INODE, b"K") == NEW
    tick_later(running)
    assert state(running) is State.PUBLISHED
    store.close_served(opened, writer=True)
    assert store.open_inos == set()
    assert_exact(running)


def test_a_rename_without_a_handle_shows_it(running: Host) -> None:
    """It is empty, and its client says that it is done."""
    store, ino = running.store, emptied(running)
    store.rename(ROOT_INODE, b"K", ROOT_INODE, b"L", who=SERVER)
    assert seen_by(running, ino, LOCAL)
    tick_later(running)
    assert state(running, b"L") is State.PUBLISHED
    assert store.open_inos == set()
    assert_exact(running)


def test_who_has_it_open_sees_it_happen(running: Host) -> None:
    """[life-server-empties] As on any file system; it is asked for by its descriptor."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)
    reader = store.open_to_read(ino)
    store.truncate(ino, 0, SERVER)
    assert not store.known_from_before(ino)
    assert os.pread(store.extent_fd(reader), 1, 0) == b""
    store.close(reader, writer=False)
    assert store.known_from_before(ino)


def test_a_local_process_stores_over_it(running: Host) -> None:
    """[life-server-empties] With O_TRUNC, by a fresh inode; the client's handle leads nowhere."""
    store, ino = running.store, emptied(running)
    with pytest.raises(DeadInode):
        store.open(ino, writer=True, truncate=True, maker=LOCAL, thread=5)
    fresh = store.looked_up(store.lookup(ROOT_INODE, b"K"), 5, LOCAL)
    assert fresh != ino
    opened = store.open(fresh, writer=True, truncate=True, maker=LOCAL, thread=5)
    write(store, opened, NEW)
    store.close(opened, writer=True)
    assert get(store, ROOT_INODE, b"K") == NEW
    store.end_second_tries()
    tick_later(running)
    settle(store)
    assert store.open_inos == set()
    assert names(running) == [b"K"]
    assert_exact(running)


def test_what_is_removed_goes(running: Host) -> None:
    store = running.store
    emptied(running)
    store.unlink(ROOT_INODE, b"K")
    tick_later(running)
    settle(store)
    assert store.open_inos == set()
    assert_exact(running)


# ---- the ends of a server ----


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize("bytes_written", [0, 5000])
def test_after_a_kill_it_is_absent(running: Host, bytes_written: int) -> None:
    """[life-server-empties] Never back, and never short."""
    store, ino = running.store, emptied(running)
    if bytes_written:
        write(store, store.open_served(ino, writer=True), NEW[:bytes_written])
    running.kill()
    running.start()
    settle(running.store)
    assert state(running) is None
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
def test_killed_before_a_byte_goes_it_is_absent(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index knows that it is emptied before it is."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)

    def die(_fd: int, _size_bytes: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.syscalls, "ftruncate", die)
        with pytest.raises(KeyboardInterrupt):
            store.truncate(ino, 0, SERVER)
    running.kill()
    running.start()
    assert state(running) is None


def test_a_clean_stop_drops_what_is_not_closed(running: Host) -> None:
    """[life-server-empties] As it drops every draft: its client may be in the middle."""
    emptied(running)
    running.stop(all_closed=True)
    running.start()
    assert state(running) is None
    assert_exact(running)


def test_at_the_end_of_its_lease_it_must_be_whole(running: Host) -> None:
    """[life-server] The client died in the middle: a hole is what tells."""
    store, ino = running.store, emptied(running)
    opened = store.open_served(ino, writer=True)
    write(store, opened, b"x" * 4096, 8192)
    store.close_served(opened, writer=True)
    assert state(running) is State.LEASED
    store.end_leases(1e9)
    settle(store)
    assert state(running) is None


# ---- what is emptied in place, as before ----


def test_another_size_is_cut_in_place(running: Host) -> None:
    """[life-server-empties]"""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)
    store.truncate(ino, 4096, SERVER)
    assert seen_by(running, ino, LOCAL)
    assert get(store, ROOT_INODE, b"K") == OLD[:4096]


def test_what_a_process_writes_is_emptied_for_all(running: Host) -> None:
    """[life-server-empties] A log that a client empties is in use here."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"log", OLD)
    opened = store.open(ino, writer=True, truncate=False, appends=True, maker=LOCAL)
    store.truncate(ino, 0, SERVER)
    assert seen_by(running, ino, LOCAL)
    assert store.present(ino).size_bytes == 0
    write(store, opened, b"line")
    store.close(opened, writer=True)
    assert get(store, ROOT_INODE, b"log") == b"line"


def test_a_process_empties_in_place(running: Host) -> None:
    """truncate(2): it is no server."""
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)
    store.truncate(ino, 0, LOCAL)
    assert seen_by(running, ino, LOCAL)
    assert get(store, ROOT_INODE, b"K") == b""


def test_a_draft_stays_what_it_is(running: Host) -> None:
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"K", FILE, 0, 0, SERVER)
    write(store, opened, OLD)
    store.truncate(opened.ino, 0, SERVER)
    assert seen_by(running, opened.ino, LOCAL)
    assert opened.writers == 1


def test_a_block_without_a_name_is_emptied_in_place(running: Host) -> None:
    store, ino = running.store, put(running.store, ROOT_INODE, b"K", OLD)
    opened = store.open_served(ino, writer=True)
    store.unlink(ROOT_INODE, b"K")
    store.truncate(ino, 0, SERVER)
    assert opened.writers == 1
    store.close_served(opened, writer=True)
    assert store.open_inos == set()


def test_a_slab_is_a_draft_too(running: Host) -> None:
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"K", FILE, 0, 0, SERVER)
    allocate(store, opened, 8192)
    write(store, opened, OLD)
    store.close(opened, writer=True)
    assert state(running) is State.SLAB
    store.truncate(opened.ino, 0, SERVER)
    assert_hidden(running, opened.ino)
    tick_later(running)
    assert state(running) is State.LEASED
    assert_exact(running)


# ---- what fails ----


@pytest.mark.usefixtures("caplog")
def test_an_index_that_is_full_refuses_and_nothing_changes() -> None:
    with host() as made:
        calls = FailingSyscalls(["commit"], 0, 28, for_good=True)
        made.start(calls)
        ino = put(made.store, ROOT_INODE, b"K", OLD)
        settle(made.store)
        calls.fail_at = 1
        with pytest.raises(NoSpace):
            made.store.truncate(ino, 0, SERVER)
        calls.fail_at = 0
        settle(made.store)
        assert get(made.store, ROOT_INODE, b"K") == OLD
        assert made.store.open_inos == set()


@pytest.mark.usefixtures("caplog")
def test_a_device_that_cuts_nothing_shows_the_whole_block_again() -> None:
    with host() as made:
        calls = FailingSyscalls(["ftruncate"], 0, for_good=True)
        made.start(calls)
        ino = put(made.store, ROOT_INODE, b"K", OLD)
        calls.fail_at = 1
        with pytest.raises(OSError, match="error"):
            made.store.truncate(ino, 0, SERVER)
        calls.fail_at = 0
        tick_later(made)
        assert get(made.store, ROOT_INODE, b"K") == OLD
        assert made.store.open_inos == set()


def test_writers_that_run_free_are_watched(running: Host, kernel: KernelRecorder) -> None:
    """[capacity] What it takes anew nobody has asked for: on passthrough it is looked at."""
    kernel.writers_run_free = True
    store = running.store
    ino = emptied(running)
    assert store.opened(ino).through_daemon  # there is no room for a writer that asks nobody
    other = put(store, ROOT_INODE, b"L", OLD)
    held = store.open_served(other, writer=True)
    assert not held.runs_free
    store.truncate(other, 0, SERVER)
    assert held.runs_free
    assert set(store.runners) == {other}
