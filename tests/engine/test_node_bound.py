"""What is never evicted, and costs a user nothing to make, takes a part of the pool only."""

from collections.abc import Iterator

import pytest

from kvfs.core.account import Accounts
from kvfs.core.errors import NoSpace, NotFound
from kvfs.core.index_room import NodeShares, bound_bytes, names_too_many, unevictable_bytes
from kvfs.core.inode_rules import blank_record
from kvfs.core.records import Counters
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import (
    DIRECTORY,
    FIFO,
    MIB,
    SYMLINK,
    Host,
    host,
    make_directory,
    put,
)

USER, OTHER, THIRD = 1000, 1001, 1002
CAPACITY_BYTES = 64 * MIB


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def owned_by(uid: int) -> InodeRecord:
    """Return a directory's record."""
    return blank_record(ROOT_INODE, b"d", DIRECTORY, uid, 0, 1)


def test_what_is_evicted_costs_nothing_here() -> None:
    rows_bytes = 550 * 10_000
    assert unevictable_bytes(Counters(blocks=10_000), rows_bytes) == 0
    assert unevictable_bytes(Counters(directories=10), 5000) == 10 * 1024 + 5000
    assert unevictable_bytes(Counters(symlinks=10), 5000) == 10 * 5 * 1024 + 5000


def test_the_bound_is_a_share_of_the_capacity() -> None:
    assert bound_bytes(2048 * MIB) == 512 * MIB
    assert bound_bytes(MIB) == 8 * MIB


@pytest.mark.parametrize("kind", ["mkdir", "symlink", "xattr"])
def test_no_user_takes_the_index_from_the_blocks(kind: str) -> None:
    """Where its map is small beside the pool: rows that never go would send all blocks away."""
    with host(capacity_bytes=1 << 30) as machine:
        store = machine.start()
        for number in range(50):
            put(store, ROOT_INODE, b"tmp", b"block")
            store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"block%d" % number, replace=True)
        own = make_directory(machine, b"own", uid=USER)

        def make(number: int) -> None:
            name = b"%d" % number
            if kind == "symlink":
                store.make_node(own, name, SYMLINK, USER, 0, target=b"." * 4000)
                return
            made, _ = store.make_node(own, name, DIRECTORY, USER, 0)
            if kind == "xattr":
                store.set_xattr(made, b"user.note", bytes(4000), uid=USER)

        with pytest.raises(NoSpace):
            any(make(number) for number in range(100_000))
        store.tick()
        assert store.evicted_blocks == 0
        assert store.index_rows_bytes() < machine.settings.index_map_bytes // 2


def test_over_the_bound_only_who_has_an_equal_share_is_refused() -> None:
    shares = NodeShares(lambda _: True, Accounts().names)
    shares.set_attributes(InodeNo(5), owned_by(USER), 20 * MIB)
    shares.set_attributes(InodeNo(6), owned_by(OTHER), 2 * MIB)
    for refused, everyones_bytes in (((), 16), ((USER,), 17), ((USER, OTHER, THIRD), 34)):
        for uid in (0, USER, OTHER, THIRD):
            refuses = shares.refuses(uid, everyones_bytes * MIB, 4 * 16 * MIB + 4)
            assert refuses == (uid in refused)
    shares.set_attributes(InodeNo(6), owned_by(OTHER), 6 * MIB)
    assert shares.refuses(OTHER, 17 * MIB, 64 * MIB)


@pytest.mark.parametrize("target", [b"t", b"t" * 4000])
def test_a_user_makes_symlinks_up_to_the_bound_and_others_store_on(
    running: Host, target: bytes
) -> None:
    store = running.store
    mine = make_directory(running, b"mine", uid=USER)
    made = 0
    with pytest.raises(NoSpace, match="share"):  # noqa: PT012
        for made in range(100_000):
            store.make_node(mine, b"%06d" % made, SYMLINK, USER, 0, target)
    held_bytes = unevictable_bytes(store.counters, store.index_rows_bytes())
    assert CAPACITY_BYTES // 4 <= held_bytes < CAPACITY_BYTES // 3
    for refused in (DIRECTORY, SYMLINK):
        with pytest.raises(NoSpace):
            store.make_node(mine, b"one", refused, USER, 0, b"t")
    with pytest.raises(NoSpace):
        store.set_xattr(mine, b"user.large", b"x" * 4000, USER)
    theirs = make_directory(running, b"theirs", uid=OTHER)
    store.make_node(theirs, b"one", SYMLINK, OTHER, 0, b"t")
    store.set_xattr(theirs, b"user.large", b"x" * 4000, OTHER)
    make_directory(running, b"root's")
    put(store, mine, b"block", b"x" * MIB)
    for number in range(made // 2):
        store.unlink(mine, b"%06d" % number)
    store.make_node(mine, b"one", SYMLINK, USER, 0, b"t")


def charged(running: Host) -> dict[int, int]:
    """Return the bytes that the running store counts for each user."""
    return {uid: running.store.node_bytes(uid) for uid in (0, USER, OTHER)}


def walk(running: Host) -> None:
    """Let the walks after a start end."""
    running.store.run_all()


def make_all_kinds(running: Host) -> list[InodeNo]:
    """Have two users make some of each kind; return the first one's directory and file."""
    store = running.store
    mine = make_directory(running, b"mine", uid=USER)
    theirs = make_directory(running, b"theirs", uid=OTHER)
    for parent, uid in ((mine, USER), (theirs, OTHER), (theirs, USER)):
        for number in range(300):
            store.make_node(parent, b"%d-%d" % (uid, number), SYMLINK, uid, 0, b"to")
    store.make_node(mine, b"fifo", FIFO, USER, 0)
    block = put(store, mine, b"block", b"x")
    store.change(block, uid=USER)
    for ino in (mine, block):
        store.set_xattr(ino, b"user.one", b"1" * 1900, USER)
        store.set_xattr(ino, b"user.one", b"1" * 100, USER)
        store.set_xattr(ino, b"user.two", b"2" * 2500, USER)
        store.remove_xattr(ino, b"user.two", USER)
    return [mine, block]


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_start_counts_what_each_user_has(
    running: Host, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_all_kinds(running)
    running.store.hurry()  # else nobody knows of them after a power loss
    before = charged(running)
    assert before[0] == 0
    assert before[USER] > before[OTHER] > 300 * 5 * 1024
    getattr(running, end)()
    running.start()
    assert ("not stopped" in caplog.text) == (end == "kill")
    assert ("cut off" in caplog.text) == (end == "lose_power")
    assert charged(running) == dict.fromkeys(before, 0)
    walk(running)
    after = charged(running)
    if end == "lose_power":  # attributes have no identity
        assert after[OTHER] == before[OTHER]
        assert before[USER] - 2000 < after[USER] < before[USER]
    else:
        assert after == before


def test_what_changes_during_the_walk_is_counted_once(running: Host) -> None:
    mine, block = make_all_kinds(running)
    before = charged(running)
    running.stop()
    store = running.start()
    theirs = store.lookup(ROOT_INODE, b"theirs")

    def change(number: int) -> None:
        store.unlink(mine, b"%d-%d" % (USER, number))
        store.make_node(mine, b"again-%d" % number, SYMLINK, USER, 0, b"to")
        ino = store.lookup(theirs, b"%d-%d" % (OTHER, number))
        store.change(ino, uid=0)
        store.change(ino, uid=OTHER)
        for holder in (mine, block):
            store.set_xattr(holder, b"user.%d" % number, b"x")
            store.remove_xattr(holder, b"user.%d" % number)

    for number in range(300):
        change(number)
        store.run_one()
    walk(running)
    assert charged(running) == before


def test_what_goes_and_changes_hands_is_not_charged_any_more(running: Host) -> None:
    store = running.store
    mine, block = make_all_kinds(running)
    before = charged(running)
    for ino in (mine, block):
        store.change(ino, uid=OTHER)
    between = charged(running)
    assert between[USER] + between[OTHER] == before[USER] + before[OTHER]
    assert between[OTHER] > before[OTHER]
    theirs = store.lookup(ROOT_INODE, b"theirs")
    for parent in (mine, theirs):
        while found := store.children(parent, InodeNo(0)):
            for _, name in found:
                store.unlink(parent, name)
    for name in (b"mine", b"theirs"):
        store.rmdir(ROOT_INODE, name)
    assert charged(running) == {0: 0, USER: 0, OTHER: 0}


def test_names_that_take_a_quarter_are_too_many() -> None:
    most = 16 * MIB // 1574
    assert names_too_many(Counters(blocks=most), CAPACITY_BYTES) == 0
    assert names_too_many(Counters(blocks=most + 7), CAPACITY_BYTES) == 7


def test_empty_blocks_go_where_the_device_is_short_and_nowhere_else(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several plans: one is a list in memory, however many names are too many."""
    set_limit(monkeypatch, "names of a plan", 16)
    store, plans = running.store, list[object]()
    put(store, ROOT_INODE, b"full", b"x" * 100)
    most = 8 * MIB // 1574
    for number in range(most + 200):
        put(store, ROOT_INODE, b"tmp", b"")
        store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"%d" % number, replace=True)
    capacity_bytes = 16 * MIB  # a quarter is 4, and 8 is the least
    store.bound_space(capacity_bytes, capacity_bytes)
    store.evict_names()
    assert store.counters.blocks == most + 201
    store.bound_space(capacity_bytes, capacity_bytes - 1)
    store.note_calls(monkeypatch, "plan of empty names", plans.append)
    for _ in range(3):
        store.evict_names()
    assert len(plans) >= 200 // 16
    assert store.counters.blocks == most
    assert store.lookup(ROOT_INODE, b"full")
    assert store.lookup(ROOT_INODE, b"%d" % (most + 199))
    with pytest.raises(NotFound):
        store.lookup(ROOT_INODE, b"0")
