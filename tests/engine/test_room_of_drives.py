"""Each drive has room for itself: its counters, its headroom, its eviction, and none in vain."""

import dataclasses
import random
from collections.abc import Iterator

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.errors import NoSpace
from kvfs.core.records import DriveCount, drive_key, pack_drive_count
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, DriveNo, InodeNo
from kvfs.storage.index import Index
from tests.support.store.driven import Driven
from tests.support.store.stores import (
    FILE,
    MIB,
    Host,
    assert_exact,
    assert_no_strays,
    host,
    put,
    settle,
    tree,
    write,
)

pytestmark = pytest.mark.usefixtures("caplog")

#: What drives of 2, 2, 4 and 8 units hold.
UNIT_BYTES = 4 * MIB
UNITS = [2, 2, 4, 8]
BLOCK_BYTES = MIB
DRIVE_BYTES = 16 * MIB


@pytest.fixture
def pair() -> Iterator[Host]:
    """Yield a host whose store runs on two small drives."""
    with host(capacity_bytes=DRIVE_BYTES, others_bytes=[DRIVE_BYTES]) as made:
        made.start()
        yield made


def publish(store: Driven, number: int, size_bytes: int) -> InodeNo:
    """Store a block as a connector does."""
    ino = put(store, ROOT_INODE, b"tmp", b"x" * size_bytes)
    store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"%06d" % number, replace=True)
    return ino


def drive_of(made: Host, ino: InodeNo) -> int:
    return Numbering(len(made.drives)).drive(ino)


def numbers_on(made: Host) -> list[list[int]]:
    """Return which blocks there are on each drive, by their numbers in order."""
    found: list[list[int]] = [[] for _ in made.drives]
    rows = [(ino, record.name) for ino, record in made.store.records().items()]
    for ino, name in sorted(rows, key=lambda row: row[1]):
        if name.isdigit():
            found[drive_of(made, ino)].append(int(name))
    return found


def extents_bytes(made: Host) -> list[int]:
    """Return what lies in the extents of each drive."""
    return [
        sum(file.stat().st_blocks * 512 for file in (drive / "extents").glob("??/*"))
        for drive in made.drives
    ]


def test_drives_of_different_sizes_keep_blocks_equally_long() -> None:
    """12 times what the pool holds, of mixed sizes: nobody is refused, and no drive overflows."""
    sizes_bytes = [units * UNIT_BYTES for units in UNITS]
    mixed = random.Random(7)
    with host(capacity_bytes=sizes_bytes[0], others_bytes=sizes_bytes[1:]) as made:
        # By age alone: blocks that are used again stay longer, wherever they are.
        store = made.start(settings=dataclasses.replace(made.settings, eviction="lru"))
        number = stored_bytes = 0
        while stored_bytes < 12 * sum(sizes_bytes):
            size_bytes = mixed.choice([70_000, 100_000, 180_000, 300_000])
            publish(store, number, size_bytes)
            stored_bytes += size_bytes
            number += 1
            if number % 50 == 0:
                store.tick()
                store.run_all()
                for lying, most in zip(extents_bytes(made), sizes_bytes, strict=True):
                    assert lying <= most
        settle(store)
        assert_exact(made)
        ages = [number - numbers[0] for numbers in numbers_on(made)]
        assert min(ages) >= 0.8 * max(ages), ages


def test_the_drive_that_lacks_room_evicts_its_own_oldest(pair: Host) -> None:
    store = pair.store
    for number in range(20):
        publish(store, number, BLOCK_BYTES)
    settle(store)
    before = numbers_on(pair)
    opened, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    drive = drive_of(pair, opened.ino)
    write(store, opened, b"y" * (10 * BLOCK_BYTES))
    store.unlink(ROOT_INODE, b"draft")
    after = numbers_on(pair)
    assert after[1 - drive] == before[1 - drive], "they need no room"
    gone = len(before[drive]) - len(after[drive])
    assert gone >= 3
    assert after[drive] == before[drive][gone:], "in the order of the pool"
    store.close(opened, writer=True)


def test_another_drive_is_asked_before_anybody_is_refused(pair: Host) -> None:
    store = pair.store
    store.bound_space(DRIVE_BYTES, 0)  # others fill the file system of the first drive
    inos = [put(store, ROOT_INODE, b"%d.tmp" % number, b"x" * BLOCK_BYTES) for number in range(8)]
    assert {drive_of(pair, ino) for ino in inos} == {1}
    for number in range(8, 15):
        put(store, ROOT_INODE, b"%d.tmp" % number, b"x" * BLOCK_BYTES)
    with pytest.raises(NoSpace):  # all are leased, and the second drive is full, too
        put(store, ROOT_INODE, b"one too many.tmp", b"x" * 2 * BLOCK_BYTES)


def test_nothing_is_evicted_for_a_block_that_another_drive_can_hold(pair: Host) -> None:
    store = pair.store
    number = 0
    while max(len(numbers) for numbers in numbers_on(pair)) < 15:
        publish(store, number, BLOCK_BYTES)
        number += 1
    held = numbers_on(pair)
    for name in held[1]:
        store.unlink(ROOT_INODE, b"%06d" % name)
    settle(store)
    for more in range(number, number + 12):
        publish(store, more, BLOCK_BYTES)
    assert set(numbers_on(pair)[0]) >= set(held[0])


def test_what_was_removed_lately_stays_on_drives_that_have_room(pair: Host) -> None:
    """Its OPEN may still come; only the drive that lacks space needs it."""
    store = pair.store
    inos = [publish(store, number, PAGE_BYTES) for number in range(8)]
    for number in range(8):
        store.unlink(ROOT_INODE, b"%06d" % number)
    lately = store.removed_lately()
    assert {drive_of(pair, ino) for ino in lately} == {0, 1}
    there = next(ino for ino in inos if drive_of(pair, ino) == 1)
    store.require_space(DRIVE_BYTES - PAGE_BYTES, there)
    assert store.removed_lately() == {ino for ino in lately if drive_of(pair, ino) == 0}


def test_a_drive_with_nothing_to_evict_has_no_hope_by_another_one(pair: Host) -> None:
    store = pair.store
    inos = [publish(store, number, MIB) for number in range(4)]
    for number in range(4):
        if drive_of(pair, inos[number]) == 1:
            store.unlink(ROOT_INODE, b"%06d" % number)
    settle(store)
    assert store.hopeful_drives == [0]


def test_a_drive_waits_for_its_own_readers(pair: Host) -> None:
    store = pair.store
    inos = [publish(store, number, MIB) for number in range(2)]
    reader = store.open(inos[1], writer=False, truncate=False)
    store.unlink(ROOT_INODE, b"%06d" % 1)
    assert store.drives_awaiting_users == [drive_of(pair, inos[1])]
    store.close(reader, writer=False)


def test_the_pool_is_the_sum_of_its_drives(pair: Host) -> None:
    store = pair.store
    assert store.totals().blocks == 2 * DRIVE_BYTES // PAGE_BYTES
    free = store.totals().blocks_free
    for number in range(4):
        put(store, ROOT_INODE, b"%d.tmp" % number, b"x" * BLOCK_BYTES)
    assert store.totals().blocks_free == free - 4 * BLOCK_BYTES // PAGE_BYTES
    assert store.describe()["capacity_bytes"] == 2 * DRIVE_BYTES


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_the_counts_of_each_drive_outlive_the_server(pair: Host, end: str) -> None:
    store = pair.store
    for number in range(9):
        publish(store, number, (number + 1) * 5000)
    store.unlink(ROOT_INODE, b"%06d" % 4)
    if end == "lose_power":
        store.sync()
    getattr(pair, end)()
    store = pair.start()
    settle(store)
    assert_exact(pair)
    assert [len(numbers) for numbers in numbers_on(pair)] == [4, 4]
    pair.stop()
    assert not pair.check().problems


def test_a_server_that_takes_over_counts_as_the_last_one() -> None:
    with host(capacity_bytes=DRIVE_BYTES, others_bytes=[DRIVE_BYTES] * 2) as made:
        store = made.start_outliving()
        try:
            for number in range(7):
                publish(store, number, (number + 1) * 5000)
            for number in range(5):
                store.create(ROOT_INODE, b"draft %d" % number, FILE, 0, 0)
            store = made.take_over()
            settle(store)
            assert_exact(made)
            assert_no_strays(store)
            assert len(tree(store)) == 7
        finally:
            made.forget_outliving()


def test_fsck_mends_the_count_of_a_drive() -> None:
    with host(index_place="pool", others_bytes=[DRIVE_BYTES]) as made:
        store = made.start()
        for number in range(10):
            publish(store, number, 5000)
        there = len(numbers_on(made)[1])
        made.stop()
        wrong = pack_drive_count(DriveNo(1), DriveCount(1, 7))
        with Index(str(made.index_path()), map_size_bytes=64 * MIB) as index, index.write() as txn:
            txn.enter_logged({drive_key(DriveNo(1)): wrong})
        (problem,) = made.check().problems
        assert problem == f"drive 1: (1, 7), counted ({there}, {there * 2 * PAGE_BYTES})"
        assert made.check(repair=True).repaired == 1
        assert not made.check().problems
        made.start()
        assert_exact(made)


def test_a_pool_of_one_drive_has_no_row_for_it() -> None:
    with host(index_place="pool") as made:
        store = made.start()
        publish(store, 0, 5000)
        made.stop()
        with Index(str(made.index_path()), map_size_bytes=64 * MIB, read_only=True) as index:
            keys = [key for rows in index.walk(drive_key(DriveNo(0))[:-1], 10) for key, _ in rows]
        assert not keys
