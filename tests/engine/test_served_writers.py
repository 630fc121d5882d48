"""When a file server's writer counts as closed: not while it writes, and no torn draft."""

from typing import Final

import pytest

from kvfs.core.errors import NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE
from kvfs.machine.processes import SERVER
from tests.support.store.driven import AllocationRequest, Opened
from tests.support.store.stores import FILE, MIB, Host, assert_exact, get, put, settle, write

pytestmark = pytest.mark.usefixtures("caplog")

OLD: Final = b"old bytes" * 100
#: Much longer than ``file_server_close_s``.
DAY: Final = 1.0


def draft_of_a_server(running: Host, data: bytes = b"bytes") -> Opened:
    opened, _ = running.store.create(ROOT_INODE, b"K.tmp", FILE, 0, 0, SERVER)
    running.store.serve(opened, writer=True, passing=False)
    write(running.store, opened, data)
    return opened


def renamed_by_the_server(running: Host) -> None:
    running.store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K", replace=True, who=SERVER)


def pass_some_looks(running: Host) -> None:
    """Let a look see that nothing was written since the one before, for long."""
    for _ in range(2):
        running.store.pass_looks(DAY)


def test_a_server_does_not_count_as_closed_while_a_write_of_it_is_under_way(running: Host) -> None:
    """Its bytes may wait for a slow device all the while."""
    opened = draft_of_a_server(running)
    opened.begin_transfer()
    pass_some_looks(running)
    assert (opened.served_writers, opened.quiet_writers) == (1, 0)
    assert running.store.record(opened.ino).state == State.DRAFT
    opened.end_transfer()
    pass_some_looks(running)
    assert (opened.served_writers, opened.quiet_writers) == (0, 1)
    assert get(running.store, ROOT_INODE, b"K.tmp") == b"bytes"
    running.store.close_served(opened, writer=True)
    assert_exact(running)


def test_nor_while_it_allocates(running: Host) -> None:
    opened, store = draft_of_a_server(running), running.store
    allocation = store.begin_allocation(opened, AllocationRequest(0, 0, MIB))
    pass_some_looks(running)
    assert (opened.served_writers, opened.quiet_writers) == (1, 0)
    allocation.work(opened.fd)
    store.end_allocation(opened, allocation)
    pass_some_looks(running)
    assert (opened.served_writers, opened.quiet_writers) == (0, 1)
    store.close_served(opened, writer=True)
    settle(store)
    assert_exact(running)


def test_what_a_server_renames_while_it_writes_keeps_its_descriptor(running: Host) -> None:
    """The write goes on with that number, which may be another file's once it is closed."""
    opened, store = draft_of_a_server(running), running.store
    opened.begin_transfer()
    fd = opened.fd
    renamed_by_the_server(running)
    assert opened.fd == fd >= 0
    store.syscalls.pwrite(fd, b"BYTES", 0)
    opened.end_transfer()
    store.close_served(opened, writer=True)
    settle(store)
    assert get(store, ROOT_INODE, b"K") == b"BYTES"
    assert_exact(running)


def test_a_torn_draft_is_not_published_by_a_servers_rename(running: Host) -> None:
    """A write of it failed, of which its client may hear later."""
    store = running.store
    put(store, ROOT_INODE, b"K", OLD)
    opened = draft_of_a_server(running)
    opened.spoil()
    renamed_by_the_server(running)
    assert store.record(opened.ino).state in (State.TORN, State.RENAMED, State.DRAFT)
    store.close_served(opened, writer=True)
    settle(store)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"K")
    assert_exact(running)


@pytest.mark.parametrize("longer", [False, True])
def test_a_late_writer_appends_if_the_block_is_longer_than_it_was(
    running: Host, *, longer: bool
) -> None:
    """What is only longer is as whole as before; other bytes in place are a rewrite."""
    opened, store = draft_of_a_server(running), running.store
    renamed_by_the_server(running)
    settle(store)
    running.extent(opened.ino).write_bytes(b"bytes and more" if longer else b"BYTES")
    store.present(opened.ino)
    assert (opened.served_writers, opened.appended_only) == (1, longer)
    store.close_served(opened, writer=True)
    assert store.record(opened.ino).state == (State.LEASED if longer else State.REWRITTEN)
    assert get(store, ROOT_INODE, b"K") == (b"bytes and more" if longer else b"BYTES")
    settle(store)
    assert_exact(running)
