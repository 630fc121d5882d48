"""A map of the index that would be full: blocks go for their names, and what may not go is kept."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.directory_policy import PIN
from kvfs.core.errors import DeadInode, NoSpace
from kvfs.core.index_room import IndexRoom, mapped_bytes
from kvfs.core.records import child_key, inode_key, name_key, xattr_key
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import (
    MIB,
    SYMLINK,
    Host,
    assert_exact,
    get,
    host,
    make_directory,
    put,
    settle,
)

MAP_BYTES: Final = 16 * MIB
#: In the index, with each block: four attributes.
NOTES: Final = 4
NOTE: Final = bytes(4000)


@pytest.fixture
def running() -> Iterator[Host]:
    with host() as made:
        made.settings = dataclasses.replace(made.settings, index_map_bytes=MAP_BYTES)
        made.start()
        yield made


def store_block(running: Host, number: int, data: bytes | None = None) -> bytes:
    """Store a small block that takes 16 KiB of the index; return its name, and content."""
    name = b"%06d" % number
    ino = put(running.store, ROOT_INODE, b"tmp", name if data is None else data)
    running.store.rename(ROOT_INODE, b"tmp", ROOT_INODE, name, replace=True)
    for note in range(NOTES):
        running.store.set_xattr(ino, b"user.note%d" % note, NOTE)
    return name


def rows_bytes(running: Host) -> int:
    return running.store.index_rows_bytes()


def fill(running: Host) -> list[bytes]:
    """Store until that is refused; return the names."""
    stored: list[bytes] = []
    with contextlib.suppress(NoSpace):
        for number in itertools.count():
            stored.append(store_block(running, number))
            if number % 10 == 9:
                running.store.tick()
    return stored


@pytest.mark.parametrize("planned", ["at once", "in the thread"])
def test_the_oldest_blocks_go_before_the_map_is_full(
    running: Host, planned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planned == "in the thread":
        set_limit(monkeypatch, "plan_inline_rows", 0)
    for number in range(2000):
        name = store_block(running, number)
        if number % 10 == 9:
            running.store.tick()
            running.store.drain()
            assert rows_bytes(running) < MAP_BYTES * 3 // 4
    there = sorted(record.name for record in running.store.records().values() if record.name)
    assert 300 < len(there) < 1000
    assert rows_bytes(running) > MAP_BYTES // 4
    assert running.store.evicted_blocks == 2000 - len(there)
    assert there[-100:] == [b"%06d" % number for number in range(1900, 2000)]
    assert_exact(running)
    running.stop()
    running.start()
    assert get(running.store, ROOT_INODE, name) == name
    running.stop()
    assert running.check().problems == []


@pytest.mark.usefixtures("caplog")  # the start after a kill says so
def test_what_may_not_go_is_kept_and_can_be_removed(running: Host) -> None:
    """Nothing may go: it ends in ENOSPC, with room left to remove, rename, pin less and start."""
    running.store.set_xattr(ROOT_INODE, PIN, b"1")
    stored = fill(running)
    assert len(stored) > 400
    running.kill()
    running.start()
    settle(running.store)
    with pytest.raises(NoSpace):
        put(running.store, ROOT_INODE, b"new", b"")
    running.store.rename(ROOT_INODE, stored[0], ROOT_INODE, b"renamed", replace=True)
    assert get(running.store, ROOT_INODE, b"renamed") == stored[0]
    for name in stored[1:300]:
        running.store.unlink(ROOT_INODE, name)
    put(running.store, ROOT_INODE, b"new", b"x")
    running.store.remove_xattr(ROOT_INODE, PIN)
    settle(running.store)
    running.stop()
    assert running.check().problems == []


def test_no_more_go_than_there_are_names_too_many(running: Host) -> None:
    """By bytes the headroom of a large pool would be wanted, too: all that small blocks hold."""
    running.stop()
    running.settings = dataclasses.replace(running.settings, capacity_bytes=8 << 30)
    running.start()
    for number in range(700):
        store_block(running, number)
        if number % 10 == 9:
            running.store.tick()
    assert 200 <= running.store.evicted_blocks < 240
    assert rows_bytes(running) > MAP_BYTES * 7 // 16


def test_empty_blocks_go_in_their_turn(running: Host) -> None:
    """They hold no space, so that for bytes none ever goes, and nobody lacks any."""
    for number in range(1000):
        store_block(running, number, b"")
        if number % 10 == 9:
            running.store.tick()
    assert running.store.evicted_blocks >= 480
    put(running.store, ROOT_INODE, b"block", bytes(MIB))
    assert get(running.store, ROOT_INODE, b"000999") == b""
    assert_exact(running)


def test_large_blocks_do_not_pay_for_small_ones_names(running: Host) -> None:
    """By rank they go first where bytes are short; here the longest unused goes, of any size."""
    large = [b"large-%d" % number for number in range(40)]
    for number in range(600):
        store_block(running, number)
        if number == 400:
            for name in large:
                put(running.store, ROOT_INODE, name, bytes(MIB // 8))
    for _ in range(40):
        running.store.tick()
    assert running.store.evicted_blocks >= 100
    assert all(get(running.store, ROOT_INODE, name) == bytes(MIB // 8) for name in large)


def test_between_two_ticks_room_is_made_at_once(running: Host) -> None:
    """A burst of names or attributes: none is refused while a block may go."""
    for number in range(1500):
        store_block(running, number)
    directory = make_directory(running, b"directory")
    for number in range(1000):
        if number % 2:
            directory = make_directory(running, b"%d" % number)
        running.store.set_xattr(directory, b"user.%d" % (number % 2), NOTE)
    assert_exact(running)


def test_a_rewritten_block_takes_its_attributes_along(running: Host) -> None:
    """Also where no attribute is taken any more: there are as many as before."""
    running.store.set_xattr(ROOT_INODE, PIN, b"1")
    stored = fill(running)
    ino = running.store.lookup(ROOT_INODE, stored[0])
    with pytest.raises(NoSpace):
        running.store.set_xattr(ROOT_INODE, b"user.more", NOTE)
    with pytest.raises(DeadInode):  # the kernel looks the name up again, and finds the fresh one
        running.store.open(ino, writer=True, truncate=True)
    fresh = running.store.lookup(ROOT_INODE, stored[0])
    assert fresh != ino
    assert running.store.xattr(fresh, b"user.note0") == NOTE


@pytest.mark.usefixtures("caplog")  # the start after a kill says so
def test_a_map_made_smaller_lets_blocks_go(running: Host) -> None:
    """LMDB would map what there is and nothing to delete in: the end of all changes."""
    running.stop()
    running.settings = dataclasses.replace(running.settings, index_map_bytes=4 * MAP_BYTES)
    running.start()
    for number in range(1200):
        store_block(running, number)
    assert (running.index_path() / "data.mdb").stat().st_size > MAP_BYTES
    running.stop()
    running.settings = dataclasses.replace(running.settings, index_map_bytes=MAP_BYTES)
    running.start()
    for _ in range(10):
        settle(running.store)
    assert rows_bytes(running) < MAP_BYTES * 3 // 4
    put(running.store, ROOT_INODE, b"new", b"x")
    assert get(running.store, ROOT_INODE, b"001199") == b"001199"
    assert running.store.evicted_blocks < 800
    running.kill()
    running.start()
    assert get(running.store, ROOT_INODE, b"001199") == b"001199"


@pytest.mark.usefixtures("caplog")  # a rebuild says so
def test_a_rebuild_brings_back_more_than_the_map_takes(running: Host) -> None:
    """Its rows lie less densely, so that a map in its usual state would not take them again."""
    running.stop()
    running.settings = dataclasses.replace(running.settings, index_map_bytes=4 * MAP_BYTES)
    running.start()
    put(running.store, ROOT_INODE, b"block", b"bytes")
    for number in range(2200):  # each more than a page
        running.store.make_node(ROOT_INODE, b"%d" % number, SYMLINK, 0, 0, b"x" * 4000)
    settle(running.store)
    running.settings = dataclasses.replace(running.settings, index_map_bytes=MAP_BYTES)
    running.lose_power()
    running.start()
    assert rows_bytes(running) > MAP_BYTES * 3 // 4
    assert running.store.counters.symlinks == 2200
    assert get(running.store, ROOT_INODE, b"block") == b"bytes"
    with pytest.raises(NoSpace):
        make_directory(running, b"directory")
    for number in range(1000):
        running.store.unlink(ROOT_INODE, b"%d" % number)
    make_directory(running, b"directory")
    running.stop()
    assert running.check().problems == []


def test_only_growth_is_refused() -> None:
    rows = 15 * MIB
    room = IndexRoom(16 * MIB, lambda: rows)
    parent, ino, other = InodeNo(1), InodeNo(20), InodeNo(21)
    added = {name_key(parent, b"b"): b"", inode_key(ino): b"", child_key(parent, ino): b""}
    with pytest.raises(NoSpace):
        room.require(added)
    with pytest.raises(NoSpace):
        room.require({xattr_key(ino, b"user.a"): b""})
    room.require({**added, name_key(parent, b"a"): None, inode_key(other): None})
    room.require({name_key(parent, b"a"): None, xattr_key(ino, b"user.a"): None})
    room.require({inode_key(ino): b""})
    room.require({xattr_key(ino, b"user.a"): b"", xattr_key(other, b"user.a"): None})
    rows = 11 * MIB
    room.require(added)
    assert room.excess_names(1100) == 300
    assert room.excess_names(1) == 1
    rows = 8 * MIB
    assert room.excess_names(1100) == 0
    # A large map keeps a share of itself.
    large = IndexRoom(1 << 36, lambda: rows)
    rows = (1 << 36) * 15 // 16
    for _ in range(64):
        large.note_commit()
    with pytest.raises(NoSpace):
        large.require(added)


@pytest.mark.parametrize(
    ("left_bytes", "commits"), [(MAP_BYTES // 2, 64), (10 * (128 << 10), 10), (-1, 1)]
)
def test_lmdb_is_asked_before_commits_can_use_up_what_is_left(
    left_bytes: int, commits: int
) -> None:
    looks: list[int] = []
    rows_bytes = MAP_BYTES - 4 * MIB - left_bytes
    room = IndexRoom(MAP_BYTES, lambda: looks.append(1) or rows_bytes)
    looks.clear()
    for _ in range(commits - 1):
        room.note_commit()
    assert looks == []
    room.note_commit()
    assert looks == [1]


def test_of_a_small_map_deletes_need_a_part() -> None:
    assert mapped_bytes(64 * MIB, 100 * MIB) == 104 * MIB
    assert mapped_bytes(MIB, 100 * MIB) == 100 * MIB + MIB // 4
