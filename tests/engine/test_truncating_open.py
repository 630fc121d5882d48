"""O_TRUNC of what somebody has, or of a final block: the name moves to a fresh inode."""

import os
from collections.abc import Iterator

import pytest

from kvfs.core.errors import DeadInode, IsADirectory, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import NOBODY, Maker
from tests.support.store.driven import Opened
from tests.support.store.life_model import NO_PID, Lives
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    get,
    host,
    put,
    settle,
    write,
)

ONE = Maker(NO_PID, 1)
OTHER = Maker(NO_PID + 1, 2)
TMP = b"K.tmp"


class Clock:
    """The pool's monotonic clock, which stands still until it is moved."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.start()
        lives = made.store.watch_processes(Lives())
        lives.begin(ONE)
        lives.begin(OTHER)
        yield made


@pytest.fixture
def clock(running: Host) -> Clock:
    clock = Clock()
    running.store.turn_clock(clock)
    return clock


def look(running: Host, name: bytes) -> InodeNo:
    return running.store.lookup(ROOT_INODE, name)


def take_name(running: Host, name: bytes, maker: Maker) -> InodeNo:
    """Do the first half of open(2) with O_TRUNC; return the fresh inode."""
    ino = look(running, name)
    with pytest.raises(DeadInode):
        running.store.open(ino, writer=True, truncate=True, maker=maker)
    fresh = look(running, name)
    assert fresh != ino
    return fresh


def open_truncated(running: Host, name: bytes, maker: Maker) -> Opened:
    fresh = take_name(running, name, maker)
    return running.store.open(fresh, writer=True, truncate=True, maker=maker)


def begin(running: Host, name: bytes, maker: Maker, data: bytes) -> Opened:
    opened, _ = running.store.create(ROOT_INODE, name, FILE, 0, 0, maker)
    write(running.store, opened, data)
    return opened


def close(running: Host, opened: Opened) -> None:
    running.store.close(opened, writer=True)


def rename(running: Host, who: Maker, name: bytes = TMP, new_name: bytes = b"K") -> InodeNo | None:
    return running.store.rename(ROOT_INODE, name, ROOT_INODE, new_name, replace=True, who=who)


# ---- a final block ----


def test_readers_keep_the_old_bytes_and_the_name_has_new_ones(running: Host) -> None:
    store = running.store
    stored = begin(running, b"K", ONE, b"old" * 3000)
    old = stored.ino
    close(running, stored)
    store.set_xattr(old, b"user.a", b"1")
    reader = store.open(old, writer=False, truncate=False)
    opened = open_truncated(running, b"K", ONE)
    write(store, opened, b"new")
    assert os.pread(store.extent_fd(reader), 10_000, 0) == b"old" * 3000
    close(running, opened)
    assert get(store, ROOT_INODE, b"K") == b"new"
    record = store.record(opened.ino)
    assert (record.state, record.maker_tgid) == (State.LEASED, ONE.tgid)
    assert store.xattr(opened.ino, b"user.a") == b"1"
    assert_exact(running)
    store.close(reader, writer=False)
    settle(store)
    assert_no_strays(store)
    assert not running.extent(old).exists()
    assert_exact(running)


def test_mode_and_owner_stay_with_the_name(running: Host) -> None:
    store = running.store
    opened, _ = store.create(ROOT_INODE, b"K", 0o100640, 7, 8)
    write(store, opened, b"x")
    close(running, opened)
    fresh = store.record(take_name(running, b"K", ONE))
    assert (fresh.mode, fresh.uid, fresh.gid) == (0o100640, 7, 8)


def test_an_empty_file_that_nobody_has_open_stays_what_it_is(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"K", b"")
    opened = store.open(ino, writer=True, truncate=True, maker=ONE)
    write(store, opened, b"first bytes")
    close(running, opened)
    assert store.record(ino).state == State.LEASED
    assert get(store, ROOT_INODE, b"K") == b"first bytes"


def test_a_block_of_blocks_that_was_never_written_is_empty(running: Host) -> None:
    """O_RDONLY|O_TRUNC: nobody will publish it, so it is at once."""
    store = running.store
    put(store, ROOT_INODE, b"K", b"old")
    fresh = take_name(running, b"K", ONE)
    opened = store.open(fresh, writer=False, truncate=True, maker=ONE)
    assert store.record(fresh).state == State.LEASED
    store.close(opened, writer=False)
    assert get(store, ROOT_INODE, b"K") == b""
    assert_exact(running)


def test_a_reader_may_be_faster_than_the_writer(running: Host) -> None:
    store = running.store
    put(store, ROOT_INODE, b"large", b"x" * 100_000)
    put(store, ROOT_INODE, b"K", b"old")
    fresh = take_name(running, b"K", ONE)
    reader = store.open(fresh, writer=False, truncate=False)
    assert os.pread(store.extent_fd(reader), 10, 0) == b""
    opened = store.open(fresh, writer=True, truncate=True, maker=ONE)
    assert opened is reader
    write(store, opened, b"new")
    store.close(reader, writer=False)
    close(running, opened)
    assert get(store, ROOT_INODE, b"K") == b"new"
    assert_exact(running)


def test_a_fresh_inode_that_nobody_opens_goes(running: Host, clock: Clock) -> None:
    """Its opener died between the two halves of open(2)."""
    put(running.store, ROOT_INODE, b"K", b"old")
    take_name(running, b"K", ONE)
    running.store.tick()
    assert look(running, b"K")
    clock.now_s += 6
    running.store.tick()
    with pytest.raises(NotFound):
        look(running, b"K")
    settle(running.store)
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_an_end_of_the_server_takes_what_waits(running: Host, end: str) -> None:
    put(running.store, ROOT_INODE, b"K", b"old")
    take_name(running, b"K", ONE)
    first = begin(running, TMP, ONE, b"1")
    take_name(running, TMP, OTHER)
    close(running, first)
    if end == "stop":
        running.stop()
        assert running.check().problems == []
    else:
        running.kill()
    running.start()
    settle(running.store)
    for name in (b"K", TMP):
        with pytest.raises(NotFound):
            look(running, name)
    assert_exact(running)


# ---- two writers of one temporary name ----


def two_writers(running: Host) -> tuple[Opened, Opened]:
    first = begin(running, TMP, ONE, b"1" * 5000)
    second = open_truncated(running, TMP, OTHER)
    write(running.store, second, b"2" * 100)
    return first, second


def test_each_of_two_writers_renames_its_own(running: Host) -> None:
    store = running.store
    first, second = two_writers(running)
    store.set_xattr(first.ino, b"user.who", b"one")
    close(running, first)
    assert rename(running, ONE) is None
    assert get(store, ROOT_INODE, b"K") == b"1" * 5000
    assert store.xattr_row(first.ino, b"user.who") == b"one"
    assert store.record(first.ino).state == State.PUBLISHED
    assert store.record(second.ino).name == TMP
    assert_exact(running)
    write(store, second, b"2" * 100, 100)
    close(running, second)
    assert rename(running, OTHER) == first.ino
    assert get(store, ROOT_INODE, b"K") == b"2" * 200
    with pytest.raises(NotFound):
        look(running, TMP)
    settle(store)
    assert_exact(running)


def test_who_comes_second_after_the_rename_finds_nothing(running: Host) -> None:
    """As on any file system: the store counts as failed, the block is there."""
    first, second = two_writers(running)
    close(running, second)
    rename(running, OTHER)
    close(running, first)
    with pytest.raises(NotFound):
        rename(running, ONE)
    assert get(running.store, ROOT_INODE, b"K") == b"2" * 100
    assert_exact(running)


def test_nobody_publishes_what_another_one_still_writes(running: Host) -> None:
    two_writers(running)
    with pytest.raises(NotFound):
        rename(running, ONE)
    with pytest.raises(NotFound):
        look(running, b"K")


def test_of_clients_that_look_alike_the_finished_one_is_meant(running: Host) -> None:
    """Two NFS clients: no process to tell them apart by."""
    first = begin(running, TMP, NOBODY, b"1")
    second = open_truncated(running, TMP, NOBODY)
    close(running, first)
    rename(running, NOBODY)
    assert look(running, b"K") == first.ino
    assert look(running, TMP) == second.ino
    close(running, second)


def test_a_torn_draft_is_renamed_by_nobody(running: Host) -> None:
    first, second = two_writers(running)
    first.tear()
    close(running, first)
    with pytest.raises(NotFound):
        rename(running, ONE)
    close(running, second)
    rename(running, OTHER)
    assert get(running.store, ROOT_INODE, b"K") == b"2" * 100


def test_a_displaced_draft_replaces_no_directory(running: Host) -> None:
    running.store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    first, second = two_writers(running)
    close(running, first)
    with pytest.raises(IsADirectory):
        rename(running, ONE, new_name=b"dir")
    assert rename(running, ONE, new_name=TMP) is None
    assert look(running, TMP) == second.ino
    close(running, second)
    assert_exact(running)


def test_a_displaced_draft_is_kept_a_minute(running: Host, clock: Clock) -> None:
    first, second = two_writers(running)
    close(running, first)
    clock.now_s += 59
    running.store.tick()
    assert first.ino in running.store.open_inos
    clock.now_s += 2
    running.store.tick()
    assert first.ino not in running.store.open_inos
    settle(running.store)
    assert_no_strays(running.store)
    assert not running.extent(first.ino).exists()
    assert_exact(running)
    close(running, second)


def test_a_displaced_draft_gives_way_to_new_blocks(running: Host) -> None:
    first = begin(running, TMP, ONE, b"1" * (40 * MIB))
    second = open_truncated(running, TMP, OTHER)
    close(running, first)
    write(running.store, second, b"2" * (30 * MIB))
    close(running, second)
    assert first.ino not in running.store.open_inos
    assert_exact(running)


def test_only_so_many_displaced_drafts_are_kept(running: Host) -> None:
    opened = [begin(running, TMP, ONE, b"0")]
    opened += [open_truncated(running, TMP, OTHER) for _ in range(70)]
    for one in opened[:-1]:
        close(running, one)
    displaced = [one for one in opened[:-1] if one.ino in running.store.open_inos]
    assert len(displaced) == 64
    close(running, opened[-1])
    settle(running.store)
    assert_exact(running)


# ---- a rename by another process ----


def test_a_draft_that_another_process_renames_is_published_at_its_last_close(
    running: Host,
) -> None:
    store = running.store
    opened = begin(running, TMP, ONE, b"half")
    rename(running, OTHER)
    assert store.record(opened.ino).state == State.DRAFT
    write(store, opened, b"whole", 4)
    close(running, opened)
    record = store.record(opened.ino)
    assert (record.state, record.name, record.maker_tgid) == (State.PUBLISHED, b"K", 0)
    assert_exact(running)


@pytest.mark.parametrize("who", [ONE, OTHER], ids=["its writer", "another process"])
def test_what_is_written_behind_a_rename_can_tear(
    running: Host, monkeypatch: pytest.MonkeyPatch, who: Maker
) -> None:
    store = running.store
    monkeypatch.setattr("kvfs.machine.processes.Processes.fate_of", lambda *_: Fate.KILLED)
    opened = begin(running, TMP, ONE, b"half")
    rename(running, who)
    write(store, opened, b"and more", 4)
    store.flush(opened, ONE.tgid)
    assert store.xattr(opened.ino, b"user.kvfs.state") == b"torn"
    close(running, opened)
    assert store.kernel.names == [b"K"]
    with pytest.raises(NotFound):
        look(running, b"K")
    assert store.describe()["torn_blocks"] == 1
    settle(store)
    assert_exact(running)


def test_a_writer_that_dies_behind_its_rename_leaves_a_whole_block(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.machine.processes.Processes.fate_of", lambda *_: Fate.KILLED)
    opened = begin(running, TMP, ONE, b"whole")
    rename(running, ONE)
    running.store.flush(opened, ONE.tgid)
    close(running, opened)
    assert get(running.store, ROOT_INODE, b"K") == b"whole"
    assert running.store.record(opened.ino).state == State.PUBLISHED


def test_a_block_rewritten_twice_is_torn_by_the_second_rewrite(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's O_DIRECT stores in place: the third one that is killed in the middle."""
    store = running.store
    ino = put(store, ROOT_INODE, b"K", b"1" * 9000)
    opened = store.open(ino, writer=True, truncate=False, maker=ONE)
    write(store, opened, b"2" * 9000)
    close(running, opened)
    assert store.record(ino).state == State.REWRITTEN
    monkeypatch.setattr("kvfs.machine.processes.Processes.fate_of", lambda *_: Fate.KILLED)
    opened = store.open(ino, writer=True, truncate=False, maker=ONE)
    write(store, opened, b"3" * 4096)
    store.flush(opened, ONE.tgid)
    close(running, opened)
    with pytest.raises(NotFound):
        look(running, b"K")
    assert_exact(running)


def test_who_empties_a_block_without_writing_is_nobody_elses_writer(running: Host) -> None:
    """O_RDONLY|O_TRUNC: the fresh, empty file may be renamed while it is open."""
    store = running.store
    put(store, ROOT_INODE, b"K", b"bytes")
    fresh = take_name(running, b"K", ONE)
    opened = store.open(fresh, writer=False, truncate=True, maker=ONE)
    assert store.record(opened.ino).size_bytes == 0
    store.rename(ROOT_INODE, b"K", ROOT_INODE, b"L", replace=True, who=ONE)
    assert look(running, b"L") == opened.ino
    store.close(opened, writer=False)
    assert_exact(running)
