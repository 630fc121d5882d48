"""Units of files that need each other (evict=together): one is gone whole, or there whole."""

import os
from collections.abc import Iterator
from itertools import count

import pytest

from kvfs.core.changed import Reason
from kvfs.core.directory_policy import EVICT, TTL
from kvfs.core.errors import NotPermitted
from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.engine.eviction.units import NAMES_MAX
from tests.support.store.driven import Driven
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    MIB,
    Host,
    allocate,
    assert_exact,
    host,
    make_directory,
    put,
    write,
)

CAPACITY_BYTES = 64 * MIB
#: A burst lasts a second at least.
BURSTS = count(10**9)
PARTS = {b"POOL": 2 * MIB, b"MANIFEST": 4096, b"log": 100}


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        yield made


def store_block(store: Driven, name: bytes, size_bytes: int, parent: InodeNo) -> InodeNo:
    opened, _ = store.create(parent, name + b".tmp", FILE, 0, 0)
    write(store, opened, name[:1] * size_bytes)
    store.close(opened, writer=True)
    store.rename(parent, name + b".tmp", parent, name, replace=True)
    return opened.ino


def pass_a_burst(store: Driven) -> None:
    store.tick_heat(10.0 * next(BURSTS))


def make_unit(running: Host, name: bytes = b"db") -> tuple[InodeNo, dict[bytes, InodeNo]]:
    """Make a unit of a pool, its index in a second file, and a log below it."""
    store = running.store
    root = make_directory(running, name)
    store.set_xattr(root, EVICT, b"together")
    below = make_directory(running, b"below", root)
    parts = {
        part: store_block(store, part, size_bytes, below if part == b"log" else root)
        for part, size_bytes in PARTS.items()
    }
    pass_a_burst(store)
    return root, parts


def there(store: Driven, parts: dict[bytes, InodeNo]) -> set[bytes]:
    return {name for name, ino in parts.items() if store.has_row(ino)}


def store_others(store: Driven, blocks: int, begin: int = 0) -> None:
    """Store blocks of 4 MiB, each in a burst of its own."""
    for number in range(begin, begin + blocks):
        store_block(store, b"%03d" % number, 4 * MIB, ROOT_INODE)
        pass_a_burst(store)


def test_all_go_at_once_when_their_turn_comes(running: Host) -> None:
    store = running.store
    store_others(store, 2)
    _, parts = make_unit(running)
    store_others(store, 14, begin=10)
    seen = {frozenset(there(store, parts))}
    for number in range(30, 40):
        store_others(store, 1, begin=number)
        seen.add(frozenset(there(store, parts)))
    assert seen == {frozenset(PARTS), frozenset()}
    assert_exact(running)


@pytest.mark.parametrize("used", sorted(PARTS))
def test_a_unit_is_as_warm_as_its_newest_use(running: Host, used: bytes) -> None:
    store = running.store
    _, parts = make_unit(running)
    store_others(store, 12)
    for number in range(20, 40):
        store.touch(parts[used])
        store_others(store, 1, begin=number)
    assert there(store, parts) == set(PARTS)
    store_others(store, 20, begin=40)
    assert not there(store, parts)


def test_small_files_of_a_unit_have_the_rank_of_the_large(running: Host) -> None:
    _, parts = make_unit(running)
    assert {running.store.heat()[ino].rank for ino in parts.values()} == {Rank.PUBLISHED}


def test_while_one_is_written_all_stay(running: Host) -> None:
    """Others go in their place, however cold the unit is, and no plan names it for ever."""
    store = running.store
    root, parts = make_unit(running)
    opened, _ = store.create(root, b"wal", FILE, 0, 0)
    write(store, opened, b"w" * 100)
    store_others(store, 40)
    assert there(store, parts) == set(PARTS)
    store.close(opened, writer=True)
    store.rename(root, b"wal", root, b"wal.1")
    store_others(store, 40, begin=50)
    assert not there(store, {**parts, b"wal.1": opened.ino})
    assert_exact(running)


def test_by_command_all_go_or_none(running: Host) -> None:
    store = running.store
    root, parts = make_unit(running)
    opened, _ = store.create(root, b"wal", FILE, 0, 0)
    assert store.evict_by_command([parts[b"log"]], open_too=True, reason=Reason.COMMAND)[0] == 0
    assert there(store, parts) == set(PARTS)
    store.close(opened, writer=True)
    store.unlink(root, b"wal")
    found = store.evict_by_command(
        [parts[b"log"], parts[b"POOL"]], open_too=True, reason=Reason.COMMAND
    )
    assert found[0] == len(PARTS)
    assert not there(store, parts)


def test_the_last_resort_takes_all_names(running: Host) -> None:
    """Who has one open reads on."""
    store = running.store
    _, parts = make_unit(running)
    reader = store.open_to_read(parts[b"POOL"])
    fd = store.extent_fd(reader)
    store_others(store, 15)
    readers = [store.open_to_read(ino) for ino in store.files_below(ROOT_INODE)]
    store.search_anew()
    store.evict(CAPACITY_BYTES)
    store.evict_used(CAPACITY_BYTES)
    assert not there(store, parts)
    assert os.pread(fd, 4, 0) == b"PPPP"
    for opened in (reader, *readers):
        store.close(opened, writer=False)


def test_a_unit_of_its_own_below_another(running: Host) -> None:
    store = running.store
    root, parts = make_unit(running)
    inner = make_directory(running, b"inner", root)
    store.set_xattr(inner, EVICT, b"together")
    loose = make_directory(running, b"loose", root)
    store.set_xattr(loose, EVICT, b"auto")
    others = [store_block(store, b"K", 4096, directory) for directory in (inner, loose)]
    store.evict_by_command([parts[b"POOL"]], open_too=True, reason=Reason.COMMAND)
    assert not there(store, parts)
    assert all(store.has_row(ino) for ino in others)


def test_a_unit_that_is_too_large_is_none_and_says_so(running: Host) -> None:
    store = running.store
    root, parts = make_unit(running)
    told = store.describe()["together"]
    assert (told["units"], told["files"], told["too_large"]) == (1, len(PARTS), [])
    for number in range(4):
        store_block(store, b"more%d" % number, 4 * MIB, root)
    assert store.describe()["together"]["too_large"] == ["/db"]
    store.evict_by_command([parts[b"POOL"]], open_too=True, reason=Reason.COMMAND)
    assert there(store, parts) == set(PARTS) - {b"POOL"}


def test_a_directory_that_holds_too_much_is_refused(running: Host) -> None:
    store = running.store
    large, many = make_directory(running, b"large"), make_directory(running, b"many")
    for number in range(5):
        store_block(store, b"K%d" % number, 4 * MIB, large)
    with pytest.raises(NotPermitted, match="together_max"):
        store.set_xattr(large, EVICT, b"together")
    for number in range(NAMES_MAX + 1):
        store.close(store.create(many, b"%d" % number, FILE, 0, 0)[0], writer=True)
    with pytest.raises(NotPermitted, match="together_max"):
        store.set_xattr(many, EVICT, b"together")
    assert store.describe()["together"]["units"] == 0


def test_it_is_known_after_a_restart_and_until_it_is_unset(running: Host) -> None:
    root, parts = make_unit(running)
    running.stop()
    running.start()
    store = running.store
    while store.run_one():
        pass
    assert store.describe()["together"]["units"] == 1
    store.remove_xattr(root, EVICT)
    assert store.describe()["together"]["units"] == 0
    store.evict_by_command([parts[b"log"]], open_too=True, reason=Reason.COMMAND)
    assert there(store, parts) == set(PARTS) - {b"log"}


def expire(store: Driven) -> None:
    """Let a whole pass through the heat begin and end."""
    for _ in range(4):
        store.let_pass_begin()
        store.tick()


def test_a_unit_expires_when_none_of_it_was_used(running: Host) -> None:
    store = running.store
    root, parts = make_unit(running)
    store.set_xattr(root, TTL, b"2d")
    expire(store)
    store.let_days_pass(1.5)
    store.touch(parts[b"log"])
    expire(store)
    store.let_days_pass(1.5)
    expire(store)
    assert there(store, parts) == set(PARTS)
    store.let_days_pass(1.5)
    expire(store)
    assert not there(store, parts)


# ---- slabs, without any policy ----


def leave_slab(running: Host, parent: InodeNo, name: bytes, size_bytes: int) -> InodeNo:
    """Write a slab of a process that ends."""
    store = running.store
    opened, _ = store.create(parent, name, FILE, 0, 0)
    allocate(store, opened, size_bytes)
    write(store, opened, name[:1] * size_bytes)
    store.close(opened, writer=True)
    store.lose_maker(opened.ino)
    assert store.record(opened.ino).state == State.ORPHAN_SLAB
    return opened.ino


def test_what_says_what_is_in_a_slab_goes_with_it(running: Host) -> None:
    """[together] Not before it, though small files go first. Blocks beside it go by themselves."""
    store = running.store
    directory = make_directory(running, b"l2")
    parts = {
        b"pool": leave_slab(running, directory, b"pool", 8 * MIB),
        b".manifest.json": store_block(store, b".manifest.json", 200 << 10, directory),
        b"config": store_block(store, b"config", 100, directory),
    }
    beside = store_block(store, b"K", MIB, directory)
    pass_a_burst(store)
    store_others(store, 20)
    assert there(store, parts) == set(parts)
    assert not store.has_row(beside)
    for number in range(40, 60):
        opened, _ = store.create(ROOT_INODE, b"%d" % number, FILE, 0, 0)  # leased: they stay
        write(store, opened, bytes(4 * MIB))
        store.close(opened, writer=True)
        assert there(store, parts) in (set(), set(parts))
        if not there(store, parts):
            break
    assert not there(store, parts)
    assert_exact(running)


def test_the_slab_of_a_living_process_keeps_nothing_beside_it(running: Host) -> None:
    """Its small files are no part of it: they go when all blocks are gone, as ever."""
    store = running.store
    directory = make_directory(running, b"l2")
    opened, _ = store.create(directory, b"pool", FILE, 0, 0)
    allocate(store, opened, MIB)
    write(store, opened, b"p" * MIB)
    store.close(opened, writer=True)
    small = store_block(store, b"config", 100, directory)
    assert store.evict_by_command([small], open_too=True, reason=Reason.COMMAND)[0] == 1
    assert store.has_row(opened.ino)


def test_of_many_units_the_files_of_some_are_counted(running: Host) -> None:
    """Each may have a thousand, and a status is not to wait for all of them."""
    store = running.store
    for number in range(10):
        root, _ = store.make_node(ROOT_INODE, b"%d" % number, DIRECTORY, 0, 0)
        store.set_xattr(root, EVICT, b"together")
        put(store, root, b"K", b"x")
    told = store.describe()["together"]
    assert (told["units"], told["files"]) == (10, 8)


def test_where_many_files_lie_beside_a_slab_they_are_blocks_of_their_own(running: Host) -> None:
    store = running.store
    directory = make_directory(running, b"l2")
    slab = leave_slab(running, directory, b"pool", MIB)
    index = store_block(store, b".manifest.json", 100, directory)
    for number in range(64):
        store_block(store, b"%d" % number, 100, directory)
    assert store.evict_by_command([index], open_too=True, reason=Reason.COMMAND)[0] == 1
    assert store.has_row(slab)


def test_however_long_a_ttl_is_a_pass_begins_each_minute(running: Host) -> None:
    store, now_s = running.store, [1000.0]
    store.turn_clock(lambda: now_s[0])
    store.set_xattr(ROOT_INODE, TTL, b"300d")
    ino = put(store, ROOT_INODE, b"K.tmp", b"x")
    store.rename(ROOT_INODE, b"K.tmp", ROOT_INODE, b"K")
    expire(store)
    store.let_days_pass(301)
    now_s[0] += 59
    store.tick()
    assert store.has_row(ino)
    for _ in range(2):
        now_s[0] += 2
        store.tick()
    assert not store.has_row(ino)
