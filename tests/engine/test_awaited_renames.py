"""A close under a temporary name waits for its rename: one change, and nobody sees less for it."""

import dataclasses
import errno
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.machine.processes import Maker
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import add_follower
from tests.support.store.serving import Serving
from tests.support.store.stores import FILE, MIB, Host, assert_exact, get, host, settle

TMP: Final = b"K.tmp"
DATA: Final = b"x" * 5000
OTHER: Final = Maker(4711, 1)
#: As many closes wait at once (closes.py).
MOST: Final = 256


class Heard:
    """What followers were told, in order."""

    follows: Final = frozenset(Why)

    def __init__(self) -> None:
        self.whys: list[Why] = []

    def follow(self, changed: Changed) -> None:
        self.whys.append(changed.why)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    made = Heard()
    add_follower(monkeypatch, made)
    return made


@pytest.fixture
def running(heard: Heard) -> Iterator[Host]:
    with host() as made:
        made.start()
        yield made


def closed(store: Driven, name: bytes = TMP, *, awaits_rename: bool = True) -> InodeNo:
    """Create *name*, write it, and close it as a client of the mount does."""
    opened, _ = store.create(ROOT_INODE, name, FILE, 0, 0)
    store.syscalls.pwrite(store.extent_fd(opened), DATA, 0)
    store.close(opened, writer=True, awaits_rename=awaits_rename)
    return opened.ino


def rename(store: Driven, name: bytes = TMP, to: bytes = b"K") -> None:
    store.rename(ROOT_INODE, name, ROOT_INODE, to, replace=True)


def without_times(record: InodeRecord) -> InodeRecord:
    return record._replace(mtime_ns=0, ctime_ns=0, btime_ns=0, atime_ns=0, sequence=0)


def test_close_and_rename_are_one_change(running: Host, heard: Heard) -> None:
    """[life-state] The record is that of a close and a rename one after the other."""
    store = running.store
    ino = closed(store)
    assert heard.whys == [Why.DRAFTED]
    rename(store)
    assert heard.whys == [Why.DRAFTED, Why.STORED]
    one = store.row(ino)
    assert one.state == State.PUBLISHED
    assert one.size_bytes == len(DATA)
    assert ino not in store.open_inos
    assert get(store, ROOT_INODE, b"K") == DATA
    closed(store, b"L.tmp", awaits_rename=False)
    rename(store, b"L.tmp", b"L")
    other = store.row(store.lookup(ROOT_INODE, b"L"))
    assert without_times(one)._replace(name=b"") == without_times(other)._replace(name=b"")
    assert store.describe()["cache"]["stored_blocks"] == 2
    settle(store)
    assert_exact(running)


def test_a_tick_publishes_what_nobody_renames(running: Host, heard: Heard) -> None:
    """[life-state] The file belongs to its writer then, as any closed temporary file."""
    store = running.store
    ino = closed(store)
    assert store.row(ino).state == State.DRAFT
    store.tick()
    assert store.row(ino).state in (State.LEASED, State.ORPHAN)
    assert ino not in store.open_inos
    rename(store)
    assert heard.whys.count(Why.STORED) == 0
    assert get(store, ROOT_INODE, b"K") == DATA
    assert_exact(running)


@pytest.mark.parametrize("use", ["read", "write", "truncate", "set", "attribute"])
def test_who_uses_it_meanwhile_finds_it_published(running: Host, use: str) -> None:
    """[life-state] As if the close had not waited."""
    store = running.store
    ino = closed(store)
    if use == "read":
        assert get(store, ROOT_INODE, TMP) == DATA
    elif use == "write":
        opened = store.open(ino, writer=True, truncate=False)
        assert store.row(ino).state == State.REWRITE
        store.close(opened, writer=True)
    elif use == "truncate":
        store.truncate(ino, 100)
        assert store.present(ino).size_bytes == 100
    elif use == "set":
        store.set_xattr(ino, b"user.note", b"1")
    else:
        assert store.xattr(ino, b"user.kvfs.state") in (b"leased", b"orphan")
    assert store.row(ino).state != State.DRAFT
    assert ino not in store.open_inos
    rename(store)
    settle(store)
    assert_exact(running)


def test_all_see_what_is_closed(running: Host) -> None:
    """[life-drafts-owner] A draft of another is hidden by the policy, a closed file is not."""
    store = running.store
    store.set_xattr(ROOT_INODE, b"user.kvfs.drafts", b"owner")
    opened, record = store.create(ROOT_INODE, TMP, FILE, 0, 0)
    assert store.hidden(opened.ino, record, OTHER)
    store.close(opened, writer=True, awaits_rename=True)
    assert not store.hidden(opened.ino, store.row(opened.ino), OTHER)


def test_more_than_the_bound_are_not_kept_waiting(running: Host) -> None:
    store = running.store
    inos = [closed(store, b"%d.tmp" % number) for number in range(MOST + 1)]
    waiting = [ino for ino in inos if store.row(ino).state == State.DRAFT]
    assert waiting == inos[1:]
    store.tick()
    assert not [ino for ino in inos if ino in store.open_inos]
    assert_exact(running)


def test_an_unlinked_one_is_freed(running: Host) -> None:
    store = running.store
    ino = closed(store)
    store.unlink(ROOT_INODE, TMP)
    store.tick()
    settle(store)
    assert ino not in store.open_inos
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, TMP)
    assert_exact(running)


def test_a_rename_over_it_and_one_of_it_meet(running: Host) -> None:
    """The name that is replaced belongs to a close that still waits."""
    store = running.store
    closed(store, b"one.tmp")
    closed(store, b"two.tmp")
    rename(store, b"one.tmp", b"two.tmp")
    rename(store, b"two.tmp", b"K")
    assert get(store, ROOT_INODE, b"K") == DATA
    store.tick()
    settle(store)
    assert_exact(running)


def test_a_rename_that_fails_leaves_the_close_waiting() -> None:
    calls = FailingSyscalls(("fstat",), error_no=errno.EIO)
    with host() as made:
        store = made.start(calls)
        ino = closed(store)
        calls.fail_at = calls.calls + 1
        with pytest.raises(OSError, match="Input/output"):
            rename(store)
        assert calls.failed == 1
        assert store.row(ino).state == State.DRAFT
        rename(store)
        assert get(store, ROOT_INODE, b"K") == DATA
        assert_exact(made)


def test_a_stop_publishes_it() -> None:
    with host() as made:
        made.start()
        closed(made.store)
        made.stop()
        made.start()
        assert get(made.store, ROOT_INODE, TMP) == DATA


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize("renamed", [False, True])
def test_a_server_that_takes_over_knows_of_the_close(renamed: bool) -> None:
    """[taken-over] Killed between the close and the rename, or right after that."""
    with host() as made:
        made.start_outliving()
        closed(made.store)
        if renamed:
            rename(made.store)
        made.take_over()
        made.store.tick()
        if not renamed:
            rename(made.store)
        assert get(made.store, ROOT_INODE, b"K") == DATA
        settle(made.store)
        assert_exact(made)
        made.forget_outliving()


def test_one_that_its_writer_still_has_open_elsewhere_does_not_wait(running: Host) -> None:
    """Two handles: the close of the last one publishes."""
    store = running.store
    opened, _ = store.create(ROOT_INODE, TMP, FILE, 0, 0)
    again = store.open(opened.ino, writer=True, truncate=False)
    store.close(opened, writer=True, awaits_rename=True)
    assert store.row(opened.ino).state == State.DRAFT
    assert not opened.awaits_rename
    store.close(again, writer=True, awaits_rename=True)
    assert opened.awaits_rename
    rename(store)
    assert store.row(opened.ino).state == State.PUBLISHED


def test_a_final_name_is_published_by_its_close(running: Host) -> None:
    store = running.store
    ino = closed(store, b"K")
    assert store.row(ino).state != State.DRAFT


def test_what_waits_holds_a_small_part_of_the_pool() -> None:
    """Whatever comes before the next tick: until its rename, or a tick, nothing of it may go."""
    with host() as made:
        made.settings = dataclasses.replace(made.settings, lease_max=0.5)
        client = Serving(made)
        capacity_bytes = client.store.space.bound_bytes
        for number in range(2 * capacity_bytes // MIB):
            opened = client.create(b"%d.tmp" % number)
            client.write(opened, bytes(MIB))
            client.close(opened, awaits_rename=True)
        waiting = [client.store.row(ino).allocated_bytes for ino in client.store.open_inos]
        assert len(waiting) * MIB <= capacity_bytes / 32 + MIB
        client.end()
