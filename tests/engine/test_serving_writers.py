"""Other writers of a store that serves: past the server, ahead of their bytes, file servers."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvfs.core.errors import NotAtHand, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import NOBODY, SERVER
from tests.support.store.driven import AllocationRequest, Opened
from tests.support.store.serving import Serving, assert_as_without
from tests.support.store.stores import FILE, assert_exact

BLOCK: Final = b"block" * 4000
NEW: Final = b"new" * 3000
#: More than ``file_server_close_s``, less than ``lease_s``.
LATER_S: Final = 10.0


def write_past(client: Serving, opened: Opened, data: bytes) -> None:
    """Write as a passthrough client does."""
    fd = client.ask(lambda: client.store.extent_fd(opened))
    client.in_thread(lambda: os.pwrite(fd, data, 0))


def turn_clocks(client: Serving) -> None:
    client.store.turn_clock(lambda: time.monotonic() + LATER_S)
    client.store.let_days_pass(LATER_S / 86_400)


def open_served(client: Serving, ino: InodeNo) -> Opened:
    opened = client.ask(lambda: client.store.open_served(ino, writer=True))
    client.until_settled(opened)
    return opened


def close_served(client: Serving, opened: Opened) -> None:
    client.ask(lambda: client.store.close_served(opened, writer=True))


# ---- scenarios, each of which comes to the same with and without a loop ----


def write_past_the_server(client: Serving) -> None:
    client.store.let_writers_run()
    for number in range(4):
        opened = client.create(b"%d.tmp" % number)
        write_past(client, opened, BLOCK)
        client.tick()
        client.close(opened, awaits_rename=True)
        client.rename(b"%d.tmp" % number, b"%d" % number)
    assert client.get(b"3") == BLOCK


def overwrite_past_the_server(client: Serving) -> None:
    client.store.let_writers_run()
    opened = client.open_to_write(client.put(b"K", BLOCK))
    write_past(client, opened, NEW)
    client.tick()
    client.close(opened)
    assert client.get(b"K") == NEW + BLOCK[len(NEW) :]


def allocate_ahead(client: Serving) -> None:
    store, opened = client.store, client.create(b"K")
    wanted = AllocationRequest(0, 0, 100_000)
    allocation = client.ask(lambda: store.begin_allocation(opened, wanted))
    client.in_thread(lambda: allocation.work(opened.fd))
    store.end_allocation(opened, allocation)
    client.write(opened, BLOCK, 50_000)
    client.close(opened)
    client.finish_jobs()
    assert client.store.record(opened.ino).size_bytes == 100_000


def store_by_a_server(client: Serving) -> None:
    store = client.store
    opened = client.ask(lambda: store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0, SERVER))[0]
    store.serve(opened, writer=True, passing=False)
    client.write(opened, BLOCK)
    client.ask(lambda: store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K", who=SERVER))
    client.finish_jobs()
    assert client.get(b"K") == BLOCK
    close_served(client, opened)


def write_late_by_a_server(client: Serving) -> None:
    """The server counts as closed, and writes on by the same handle."""
    opened = open_served(client, client.put(b"K", BLOCK))
    client.write(opened, NEW)
    turn_clocks(client)
    client.tick()
    client.store.pass_looks(1.0)
    client.finish_jobs()
    write_past(client, opened, b"late")
    client.store.present(opened.ino)
    client.finish_jobs()
    close_served(client, opened)
    client.finish_jobs()
    assert client.get(b"K")[:6] == b"late" + NEW[4:6]


def empty_by_a_server(client: Serving) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    client.finish_jobs()
    client.ask(lambda: store.truncate(ino, 0, SERVER))
    client.finish_jobs()
    assert store.present(ino).size_bytes == 0
    opened = open_served(client, ino)
    client.write(opened, NEW)
    close_served(client, opened)
    client.finish_jobs()
    assert client.get(b"K") == NEW


def remove_what_a_server_has_open(client: Serving) -> None:
    opened = open_served(client, client.put(b"K", BLOCK))
    client.unlink(b"K")
    client.tick()
    close_served(client, opened)
    client.tick()
    with pytest.raises(NotFound):
        client.look_up(b"K")


@pytest.mark.parametrize(
    "scenario",
    [
        write_past_the_server,
        overwrite_past_the_server,
        allocate_ahead,
        store_by_a_server,
        write_late_by_a_server,
        empty_by_a_server,
        remove_what_a_server_has_open,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_it_comes_out_the_same_and_the_loop_never_waits(
    scenario: Callable[[Serving], None],
) -> None:
    assert_as_without(scenario)


# ---- in between ----


def quiet_writer(client: Serving, *, passing: bool = False) -> Opened:
    """Have a server write a block by a handle that counts as closed; return it."""
    store = client.store
    opened = client.ask(lambda: store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0, SERVER))[0]
    store.serve(opened, writer=True, passing=passing)
    client.write(opened, BLOCK)
    client.ask(lambda: store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K", who=SERVER))
    client.finish_jobs()
    assert not opened.writers
    return opened


def test_a_server_that_writes_late_and_closes_at_once_has_written(client: Serving) -> None:
    opened = quiet_writer(client)
    fd = client.in_thread(lambda: client.store.open_extent(opened.ino, os.O_RDWR))
    client.in_thread(lambda: os.pwrite(fd, b"late" * 6000, 0))
    os.close(fd)
    client.ask(lambda: client.store.close_served(opened, writer=True))
    client.finish_jobs()
    assert client.get(b"K") == b"late" * 6000


def test_a_server_closes_a_cold_block_once(client: Serving) -> None:
    opened = quiet_writer(client, passing=True)
    client.guard.chill()
    client.ask(lambda: client.store.close_served(opened, writer=True, passing=True))
    assert opened.served_passing == 0
    client.end()


def test_a_length_set_by_a_server_hides_the_block_at_once(client: Serving) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    client.finish_jobs()
    with client.guard.held("ftruncate"):
        client.ask(lambda: store.truncate(ino, 0, SERVER))
        assert store.opened(ino).settling
        assert store.seen(ino, store.record(ino), NOBODY) is None
    client.finish_jobs()
    assert store.present(ino).size_bytes == 0
    assert_exact(client.host)
    opened = open_served(client, ino)
    client.write(opened, NEW)
    close_served(client, opened)
    client.end()


# ---- an open that is refused while the device is silent ----


def refused(client: Serving, ino: InodeNo) -> Opened:
    """Open a block to write it, and take that back before it is settled."""
    store = client.store
    opened = client.ask(lambda: store.open(ino, writer=True, truncate=False, appends=True))
    assert opened.settling
    store.take_back(opened, appends=True)
    return opened


def test_a_block_whose_open_was_refused_stays_whole_and_gets_its_identity(client: Serving) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    client.finish_jobs()
    before = store.record(ino).state
    with client.guard.held("utime"):
        refused(client, ino)
        refused(client, ino)
        assert store.record(ino).state == State.REWRITE
    client.finish_jobs()
    assert store.record(ino).state == before
    assert client.get(b"K") == BLOCK
    client.end()


def test_a_draft_whose_open_was_refused_is_a_miss_and_no_empty_block(client: Serving) -> None:
    store, opened = client.store, client.create(b"K")
    with client.guard.held("utime"):
        store.take_back(opened, appends=False)
    client.finish_jobs()
    with pytest.raises(NotFound):
        client.look_up(b"K")
    client.end()


def test_whoever_opens_a_block_behind_a_refused_open_writes_it_whole(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    with client.guard.held("utime"):
        refused(client, ino)
        opened = client.ask(lambda: client.store.open(ino, writer=True, truncate=False))
        refused(client, ino)
    client.until_settled(opened)
    client.write(opened, NEW)
    client.close(opened)
    client.finish_jobs()
    assert client.get(b"K") == NEW + BLOCK[len(NEW) :]
    client.end()


# ---- a trim sets the mtime, by which a late write shows ----


def short_draft_of_a_server(client: Serving) -> Opened:
    """Return one with a reserve, which its rename by the server publishes."""
    client.put(b"before", BLOCK)
    client.finish_jobs()
    store = client.store
    opened = client.ask(lambda: store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0, SERVER))[0]
    store.serve(opened, writer=True, passing=False)
    client.write(opened, b"short")
    assert opened.allocated_bytes > len(b"short")
    return opened


def rename_by_a_server(client: Serving) -> None:
    store = client.store
    client.ask(lambda: store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K", who=SERVER))


def test_the_trim_of_what_a_server_renames_is_no_late_write(client: Serving) -> None:
    opened = short_draft_of_a_server(client)
    with client.guard.held("fallocate"):
        rename_by_a_server(client)
        assert opened.quiet_writers
        with pytest.raises(NotAtHand):  # nobody can tell until it has ended
            client.store.present(opened.ino)
    assert client.ask(lambda: client.store.present(opened.ino)).allocated_bytes == 4096
    assert opened.quiet_writers
    close_served(client, opened)
    client.end()


def test_a_late_write_before_the_trim_shows(client: Serving) -> None:
    opened, trims = short_draft_of_a_server(client), threading.Event()
    client.store.engine.pool.background.drives.all[0].device.submit(trims.wait, at_once=True)
    rename_by_a_server(client)
    fd = client.in_thread(lambda: client.store.open_extent(opened.ino, os.O_RDWR))
    client.in_thread(lambda: os.pwrite(fd, b"LATE!", 0))
    os.close(fd)
    trims.set()
    client.ask(lambda: client.store.present(opened.ino))
    assert not opened.quiet_writers
    assert client.store.record(opened.ino).state == State.REWRITE
    close_served(client, opened)
    client.finish_jobs()
    assert client.get(b"K") == b"LATE!"
    client.end()


@pytest.mark.usefixtures("caplog")
def test_a_trim_of_what_shows_nothing_any_more_ends(client: Serving) -> None:
    """As on a file system that has shut itself down: nothing waits for it, or is counted."""
    opened, trims = short_draft_of_a_server(client), threading.Event()
    client.store.engine.pool.background.drives.all[0].device.submit(trims.wait, at_once=True)
    rename_by_a_server(client)
    assert (client.coming_bytes > 0, opened.touches) == (True, 1)
    with client.guard.failing("fstat", "fallocate"):
        trims.set()
        client.in_order()
    assert (client.coming_bytes, opened.touches) == (0, 0)
    client.ask(lambda: client.store.present(opened.ino))
    assert opened.quiet_writers
    close_served(client, opened)
    client.finish_jobs()
    assert_exact(client.host)
    client.end()


# ---- handles that no client received ----


@pytest.fixture
def stuck(client: Serving) -> Iterator[threading.Event]:
    """The device's thread waits until this is set."""
    event = threading.Event()
    yield event
    event.set()


def test_one_of_two_writers_is_taken_back_without_the_device(
    client: Serving, stuck: threading.Event
) -> None:
    """Nothing may be counted, or noted for the next server, that only a silent device ends."""
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    opened = client.open_to_write(ino)
    client.ask(lambda: client.store.open(ino, writer=True, truncate=False, appends=True))
    assert (opened.writers, opened.appenders) == (2, 1)
    client.hold_device(stuck)
    client.store.take_back(opened, appends=True)
    assert (opened.writers, opened.appenders) == (1, 0)
    assert client.store.noted_closes(ino) == 0
    stuck.set()
    client.close(opened)
    client.finish_jobs()
    client.stop_serving()
    assert_exact(client.host)


def test_the_last_writer_is_taken_back_once_the_device_has_answered(
    client: Serving, stuck: threading.Event
) -> None:
    """Till then nobody may call the block durable. The next server finds no handle to close."""
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    opened = client.open_to_write(ino)
    client.hold_device(stuck)
    client.store.take_back(opened, appends=False)
    assert opened.writers == 1
    assert client.store.noted_closes(ino) == 0
    stuck.set()
    client.in_order()
    assert opened.writers == 0
    assert client.store.noted_closes(ino) == 0
    assert client.get(b"K") == BLOCK
    client.stop_serving()
    assert_exact(client.host)


def test_who_wrote_a_block_behind_a_refused_open_has_stored_it(
    client: Serving, stuck: threading.Event
) -> None:
    """His close may come before the device has answered for the one that was refused."""
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    opened = client.open_to_write(ino)
    client.hold_device(stuck)
    client.store.take_back(opened, appends=False)
    client.ask(lambda: client.store.open(ino, writer=True, truncate=False))
    client.write(opened, NEW)
    client.close(opened)
    stuck.set()
    client.in_order()
    assert opened.writers == 0
    assert client.get(b"K") == NEW + BLOCK[len(NEW) :]
    client.end()


def test_who_appends_may_empty_the_file_once_the_others_are_taken_back(client: Serving) -> None:
    """O_TRUNC empties what only appenders write; one that no client has is none of them."""
    ino = client.put(b"log", BLOCK)
    client.finish_jobs()
    for _ in range(2):
        client.ask(lambda: client.store.open(ino, writer=True, truncate=False, appends=True))
    opened = client.store.opened(ino)
    client.store.take_back(opened, appends=True)
    assert opened.is_shared_with(NOBODY, 0, temporary=False)
    client.close(opened)
    client.stop_serving()
