"""Hints in a running store: which blocks they keep from eviction, for how long, and who says so."""

from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.directory_policy import EVICT, HINT, LEASE, PIN
from kvfs.core.errors import DeadInode, InvalidRequest
from kvfs.core.eviction_policy import Rank
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.processes import Maker
from tests.support.store.burst_blocks import BLOCK_BYTES, CAPACITY_BYTES, FITS, flood, ranks, stored
from tests.support.store.driven import Driven
from tests.support.store.stores import Host, host, make_directory, put, settle, write

OTHER_UID: Final = 1001
WRITER: Final = Maker(1, 1)
HOUR_DAYS: Final = 1 / 24


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def names(store: Driven, parent: InodeNo) -> set[bytes]:
    return {name for _, name in store.children(parent, InodeNo(0))}


def test_a_retained_block_outlives_those_stored_after_it(running: Host) -> None:
    store = running.store
    plain, kept = make_directory(running, b"plain"), make_directory(running, b"kept")
    store.set_xattr(kept, HINT, b"priority=80")
    settle(store)
    for number in range(4):
        stored(store, b"%d" % number, plain)
        stored(store, b"%d" % number, kept)
    flood(store, 3 * FITS)
    assert (names(store, plain), names(store, kept)) == (set(), {b"0", b"1", b"2", b"3"})


def test_a_pool_full_of_retained_blocks_takes_stores(running: Host) -> None:
    """Then the lowest priority goes first, and within one what was unused for longest."""
    store = running.store
    for name, value in ((b"low", b"priority=20"), (b"high", b"priority=90")):
        store.set_xattr(make_directory(running, name), HINT, value)
    low, high = store.lookup(ROOT_INODE, b"low"), store.lookup(ROOT_INODE, b"high")
    for number in range(FITS // 2):
        stored(store, b"h%02d" % number, high)
    for number in range(FITS // 2):
        stored(store, b"l%02d" % number, low)
    assert set(ranks(store, *store.heat())) == {Rank.RETAINED}
    for number in range(3):
        stored(store, b"more%d" % number, high)
    assert names(store, low) == {b"l%02d" % number for number in range(3, FITS // 2)}
    for number in range(FITS):
        stored(store, b"again%02d" % number, high)
    assert names(store, low) == set()
    assert names(store, high) == {b"again%02d" % number for number in range(FITS)}


def test_what_is_used_once_goes_before_older_blocks(running: Host) -> None:
    store = running.store
    once = make_directory(running, b"once")
    store.set_xattr(once, HINT, b"once")
    old = stored(store, b"old")
    for number in range(3):
        stored(store, b"%d" % number, once)
    flood(store, FITS - 1)
    assert names(store, once) == set()
    assert old in store.heat()


def test_a_file_says_it_itself_before_its_directory(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    first, second, third = (stored(store, name, top) for name in (b"a", b"b", b"c"))
    store.set_xattr(first, HINT, b"once")
    assert ranks(store, first, second, third) == [Rank.FIRST, Rank.PUBLISHED, Rank.PUBLISHED]
    store.set_xattr(top, HINT, b"priority=80")
    settle(store)
    store.set_xattr(third, HINT, b"none")
    assert ranks(store, first, second, third) == [Rank.FIRST, Rank.RETAINED, Rank.PUBLISHED]
    assert [store.xattr(ino, HINT) for ino in (top, first, second, third)] == [
        *(b"priority=80", b"once"),
        *(b"priority=80", b"none"),
    ]
    store.remove_xattr(first, HINT)
    assert ranks(store, first) == [Rank.RETAINED]
    assert store.xattr(ROOT_INODE, HINT) == b"none"


def test_a_priority_ends_with_its_ttl(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    store.set_xattr(top, HINT, b"priority=80,ttl=2h")
    settle(store)
    stored(store, b"kept", top)
    flood(store, FITS)
    assert names(store, top) == {b"kept"}
    store.let_days_pass(3 * HOUR_DAYS)
    store.tick()
    flood(store, FITS)
    assert names(store, top) == set()


def test_attributes_are_in_force_after_a_restart(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    store.set_xattr(top, HINT, b"priority=80")
    own, inherits, plain = stored(store, b"own"), stored(store, b"a", top), stored(store, b"plain")
    store.set_xattr(own, HINT, b"once,session=s")
    for _ in range(2):
        running.stop()
        store = running.start()
        settle(store)
        expected = [Rank.FIRST, Rank.RETAINED, Rank.PUBLISHED]
        assert ranks(store, own, inherits, plain) == expected


def test_a_hint_moves_with_a_name_that_is_rewritten(running: Host) -> None:
    store = running.store
    store.set_xattr(ROOT_INODE, LEASE, b"none")
    ino = stored(store, b"block")
    store.set_xattr(ino, HINT, b"priority=80")
    with pytest.raises(DeadInode):  # its name leads to a new version
        store.open(ino, writer=True, truncate=True, maker=WRITER)
    fresh = store.lookup(ROOT_INODE, b"block")
    opened = store.open(fresh, writer=True, truncate=True, maker=WRITER)
    write(store, opened, b"y" * BLOCK_BYTES)
    store.close(opened, writer=True)
    now = store.lookup(ROOT_INODE, b"block")
    assert store.xattr(now, HINT) == b"priority=80"
    assert ranks(store, now) == [Rank.RETAINED]


def test_who_may_write_may_hint_and_only_what_kvfs_knows(running: Host) -> None:
    """The kernel has asked who may write (xattr_permission() in fs/xattr.c)."""
    store = running.store
    ino = stored(store, b"block")
    store.set_xattr(ino, HINT, b"priority=1", OTHER_UID)
    store.set_xattr(ROOT_INODE, HINT, b"once", OTHER_UID)
    with pytest.raises(InvalidRequest):
        store.set_xattr(ino, HINT, b"priority=101")
    with pytest.raises(InvalidRequest):
        store.set_xattr(ino, HINT, b"soon")


def test_pins_units_and_policies_come_before_hints(running: Host) -> None:
    store = running.store
    pinned = stored(store, b"pinned")
    store.set_xattr(pinned, PIN, b"1")
    never, unit = make_directory(running, b"never"), make_directory(running, b"unit")
    store.set_xattr(never, EVICT, b"never")
    store.set_xattr(unit, EVICT, b"together")
    store.set_xattr(ROOT_INODE, HINT, b"once")
    settle(store)
    inos = [pinned, stored(store, b"a", never), stored(store, b"b", unit), stored(store, b"c")]
    assert ranks(store, *inos) == [Rank.KEPT, Rank.KEPT, Rank.PUBLISHED, Rank.FIRST]


def test_small_files_are_retained_too(running: Host) -> None:
    store = running.store
    ino = put(store, ROOT_INODE, b"small.tmp", b"{}")
    store.rename(ROOT_INODE, b"small.tmp", ROOT_INODE, b"small", replace=True)
    store.set_xattr(ino, HINT, b"priority=1")
    assert ranks(store, ino) == [Rank.RETAINED]
    store.remove_xattr(ino, HINT)
    assert ranks(store, ino) == [Rank.SMALL]


def test_the_settings_file_hints_directories(running: Host) -> None:
    running.stop()
    settings = Settings(
        **{
            name: getattr(running.settings, name)
            for name in running.settings.__dataclass_fields__
            if name != "policies"
        },
        policies={"/top": {"hint": "priority=80"}},
    )
    running.start(settings=settings)
    top = make_directory(running, b"top")
    assert ranks(running.store, stored(running.store, b"a", top)) == [Rank.RETAINED]


def test_only_uses_of_what_a_hint_kept_count(running: Host) -> None:
    """That is a block older than one that was evicted for space."""
    store = running.store
    kept = stored(store, b"kept")
    store.set_xattr(kept, HINT, b"priority=80")
    store.touch(kept)
    assert store.describe()["hints"]["kept_hits"] == 0
    store.tick_heat(store.now_s() + 1000)
    flood(store, FITS)
    store.touch(kept)
    store.touch(kept)
    assert store.describe()["hints"]["kept_hits"] == 1
    store.tick_heat(store.now_s() + 2000)
    store.touch(kept)
    assert store.describe()["hints"]["kept_hits"] == 1
