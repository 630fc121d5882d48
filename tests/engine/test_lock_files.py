"""An empty file is one file for all that open it with O_TRUNC, and no block of two writers."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import DeadInode, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.machine.file_holders import DESCRIPTORS_MAX, Holders, holders
from kvfs.machine.processes import Maker
from tests.support.store.driven import Opened
from tests.support.store.driven_faults import stand_in
from tests.support.store.life_model import NO_PID, Lives
from tests.support.store.stores import FILE, Host, assert_exact, get, host, put, settle, write

ONE: Final = Maker(NO_PID, 1)
OTHER: Final = Maker(NO_PID + 1, 2)


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        lives = made.store.watch_processes(Lives())
        lives.begin(ONE)
        lives.begin(OTHER)
        yield made


def create(running: Host, name: bytes = b"K") -> Opened:
    return running.store.create(ROOT_INODE, name, FILE, 0, 0, ONE)[0]


def truncate(running: Host, ino: InodeNo, who: Maker = OTHER) -> Opened:
    """OPEN with O_TRUNC, by a thread of *who*."""
    return running.store.open(ino, writer=True, truncate=True, maker=who, thread=who.tgid)


def close(running: Host, *opened: Opened) -> None:
    for one in opened:
        running.store.close(one, writer=True)


def anything(_record: InodeRecord, *, reads: bool) -> bool:
    return True


def test_two_that_both_write_leave_a_miss(running: Host) -> None:
    """[locks-truncate] Their bytes may be mixed, and nobody can tell."""
    store, first = running.store, create(running)
    second = truncate(running, first.ino)
    assert second is first
    write(store, first, b"of one and of the other")
    close(running, first, second)
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"K")
    assert store.describe()["torn_blocks"] == 1
    settle(store)
    assert_exact(running)


def test_what_one_of_two_wrote_is_whole(running: Host) -> None:
    """The other one closed it while it was empty, as who does not get the lock."""
    store, first = running.store, create(running)
    close(running, truncate(running, first.ino))
    write(store, first, b"whole")
    close(running, first)
    assert get(store, ROOT_INODE, b"K") == b"whole"


def test_who_has_left_takes_no_bytes_of_who_stayed(running: Host) -> None:
    store, first = running.store, create(running)
    close(running, truncate(running, first.ino))
    write(store, first, b"half")
    with pytest.raises(DeadInode):
        truncate(running, first.ino)
    close(running, first)
    assert get(store, ROOT_INODE, b"K") == b"half"


def test_an_empty_lock_file_stays(running: Host) -> None:
    store, first = running.store, create(running)
    second = truncate(running, first.ino)
    close(running, first, second)
    assert store.record(first.ino).state == State.LEASED
    reader = store.open(first.ino, writer=False, truncate=False)
    close(running, truncate(running, first.ino))
    store.close(reader, writer=False)
    assert store.lookup(ROOT_INODE, b"K") == first.ino
    assert_exact(running)


def test_nobody_publishes_by_a_rename_what_two_write(running: Host) -> None:
    store, first = running.store, create(running)
    second = truncate(running, first.ino)
    write(store, first, b"of both")
    with pytest.raises(NotFound):
        store.rename(ROOT_INODE, b"K", ROOT_INODE, b"L", replace=True, who=ONE)
    close(running, first, second)


def test_what_two_left_empty_is_renamed_while_it_is_read(running: Host) -> None:
    """[locks-truncate] Nobody writes it any more, and nothing in it is of both."""
    store, first = running.store, create(running)
    second = truncate(running, first.ino)
    reader = store.open(first.ino, writer=False, truncate=False)
    write(store, first, b"of one")
    close(running, second)
    store.truncate(first.ino, 0)
    close(running, first)
    store.rename(ROOT_INODE, b"K", ROOT_INODE, b"L", replace=True, who=ONE)
    assert store.lookup(ROOT_INODE, b"L") == first.ino
    store.close(reader, writer=False)


def test_a_seen_lock_keeps_what_was_written(running: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share it take turns."""
    store, first = running.store, create(running)
    second = truncate(running, first.ino)
    write(store, first, b"a pid")
    stand_in(
        monkeypatch,
        "a lock is looked for",
        lambda ino, tgids: holders(ino, ())._replace(locked=True),
    )
    store.tick()
    close(running, first, second)
    assert get(store, ROOT_INODE, b"K") == b"a pid"


def test_a_file_that_is_locked_between_two_tries_is_emptied(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first OPEN found a draft of another; at the second try its writer has the lock."""
    store, first = running.store, create(running)
    write(store, first, b"a pid")
    with pytest.raises(DeadInode):
        truncate(running, first.ino)
    stand_in(
        monkeypatch,
        "a lock is looked for",
        lambda ino, tgids: holders(ino, ())._replace(locked=True),
    )
    found = store.lookup(ROOT_INODE, b"K")
    assert store.looked_up(found, OTHER.tgid, OTHER, anything) == first.ino
    assert truncate(running, first.ino) is first
    assert store.present(first.ino).size_bytes == 0
    close(running, first, first)
    assert_exact(running)


@pytest.mark.parametrize("name", [b"K.tmp", b"K.tmp.0a"])
def test_a_temporary_name_is_no_lock_file(running: Host, name: bytes) -> None:
    """Each of two writers renames its own."""
    first = create(running, name)
    with pytest.raises(DeadInode):
        truncate(running, first.ino)
    close(running, first)


@pytest.mark.parametrize("truncates", [True, False])
def test_the_second_rewriter_shares_the_first_ones_empty_draft(
    running: Host, truncates: bool
) -> None:
    """Others see the old version until the last close; both that write see what they write."""
    store = running.store
    old = put(store, ROOT_INODE, b"K", b"old")
    fresh = store.supersede(old, ONE.tgid)
    first = truncate(running, fresh, ONE)
    with pytest.raises(DeadInode):
        store.open(old, writer=True, truncate=truncates, maker=OTHER, thread=OTHER.tgid)
    found = store.lookup(ROOT_INODE, b"K")
    assert store.looked_up(found, OTHER.tgid, OTHER, anything) == fresh
    second = store.open(fresh, writer=True, truncate=truncates, maker=OTHER, thread=OTHER.tgid)
    assert second is first
    record = store.present(fresh)
    assert store.seen(fresh, record, OTHER) == store.seen(fresh, record, ONE) == fresh
    assert store.seen(fresh, record, Maker(102, 3)) == old
    close(running, first, second)
    assert store.seen(fresh, store.present(fresh), Maker(102, 3)) == fresh
    assert_exact(running)


def test_the_bound_on_descriptors_holds(tmp_path: Path) -> None:
    # Not of the present directory: that may be /, whose number the lock of conftest.py has, too.
    fds = [os.open(tmp_path, os.O_PATH) for _ in range(DESCRIPTORS_MAX)]
    try:
        own = os.fstat(fds[-1]).st_ino
        assert holders(own, [os.getpid()]) == (frozenset({os.getpid()}), False)
        assert holders(own, [os.getpid()] * 100).tgids == {os.getpid()}
        assert holders(own, [0]) == (frozenset(), False)
        with (tmp_path / "beyond").open("w") as file:
            fds.append(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, max(fds) + 1))
            beyond = os.fstat(file.fileno()).st_ino
        assert holders(beyond, [os.getpid()]).tgids == frozenset(), "it looks no further"
    finally:
        for fd in fds:
            os.close(fd)


def test_a_tick_looks_for_the_locks_of_a_few_files(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look reads what processes have open."""
    store, looked = running.store, list[InodeNo]()

    def look(ino: InodeNo, _tgids: object) -> Holders:
        looked.append(ino)
        return holders(ino, ())

    pairs = [
        (first := create(running, b"%d" % number), truncate(running, first.ino))
        for number in range(10)
    ]
    stand_in(monkeypatch, "a lock is looked for", look)
    store.tick()
    assert len(looked) == 4
    for pair in pairs:
        close(running, *pair)
