"""Drives in inode numbers, where 0 is today's and age goes by serials; and whose turn it is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.drives import DRIVES_MAX, SERIAL_END, ByDrive, DriveTurns, FillRates, Numbering
from kvfs.core.errors import Damaged
from kvfs.core.types import FIRST_INODE, INODE_END, LAST_INODE, DriveNo, InodeNo


@pytest.mark.parametrize("drive", [0, 1, 7, DRIVES_MAX - 1])
@pytest.mark.parametrize("serial", [FIRST_INODE, 1 << 40, SERIAL_END - 1])
def test_a_number_tells_drive_and_serial(drive: int, serial: int) -> None:
    numbering = Numbering(DRIVES_MAX)
    ino = numbering.inode(DriveNo(drive), InodeNo(serial))
    assert (numbering.drive(ino), numbering.serial(ino)) == (drive, serial)
    assert ino < 1 << 62 < INODE_END, "the list of what is not durable has room for no more"


def test_drive_0_has_the_numbers_of_a_pool_of_one_drive() -> None:
    for drives in (1, 2, DRIVES_MAX):
        assert Numbering(drives).inode(DriveNo(0), FIRST_INODE) == FIRST_INODE


@pytest.mark.parametrize("ino", [FIRST_INODE, SERIAL_END, INODE_END - 1, LAST_INODE])
def test_with_one_drive_all_of_a_number_is_serial(ino: InodeNo) -> None:
    numbering = Numbering(1)
    assert (numbering.drive(ino), numbering.serial(ino)) == (0, ino)


def test_a_thing_is_found_by_the_drive_of_an_inode() -> None:
    numbering, things = Numbering(3), ByDrive(["a", "b", "c"])
    assert [things.of(numbering.inode(DriveNo(at), FIRST_INODE)) for at in range(3)] == [*"abc"]
    assert ByDrive(["only"]).of(LAST_INODE) == "only"


def test_an_inode_of_a_drive_that_the_pool_lacks_is_damage() -> None:
    with pytest.raises(Damaged, match="no such drive"):
        ByDrive(["a", "b"]).of(Numbering(3).inode(DriveNo(2), FIRST_INODE))


def test_an_inode_of_a_drive_that_has_failed_is_damage() -> None:
    things, lost = list("ab"), set[DriveNo]()
    there = ByDrive(things, lost).of
    second = Numbering(2).inode(DriveNo(1), FIRST_INODE)
    assert there(second) == "b"
    lost.add(DriveNo(1))
    with pytest.raises(Damaged, match="has failed"):
        there(second)
    assert there(FIRST_INODE) == "a"


def test_more_drives_than_a_number_has_bits_for_are_no_pool() -> None:
    with pytest.raises(AssertionError):
        Numbering(DRIVES_MAX + 1)


# ---- turns ----

GIB = 1 << 30


def taken(capacities_bytes: list[int], turns: int) -> list[int]:
    drives, place = DriveTurns(capacities_bytes), 0
    taken = []
    for _ in range(turns):
        taken.append(drives.order(place)[0])
        place = drives.after(place, taken[-1])
    return taken


def test_equal_drives_take_turns_in_their_order() -> None:
    assert taken([GIB] * 4, 8) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_one_drive_has_every_turn() -> None:
    assert taken([GIB], 3) == [0, 0, 0]


def test_drives_of_different_sizes_fill_at_the_same_rate() -> None:
    sizes_gib = [2, 2, 4, 8]
    drives = taken([size_gib * GIB for size_gib in sizes_gib], 16 * 100)
    assert Counter(drives) == {at: 100 * size_gib for at, size_gib in enumerate(sizes_gib)}


@pytest.mark.parametrize("turns", [16, 48, 1000])
def test_after_any_number_of_turns_no_drive_is_a_block_ahead(turns: int) -> None:
    sizes_gib = [2, 2, 4, 8]
    counts = Counter(taken([size_gib * GIB for size_gib in sizes_gib], turns))
    for at, size_gib in enumerate(sizes_gib):
        assert abs(counts[at] - turns * size_gib / 16) < 2


def test_a_drive_that_can_hold_nothing_has_no_turn() -> None:
    assert 1 not in taken([GIB, 0, GIB], 100)


# ---- sizes ----


def stored(capacities_bytes: list[int], sizes_bytes: list[int]) -> list[float]:
    """Store such blocks in turn, on drives that are not ahead; return how full each is."""
    turns, rates, place = DriveTurns(capacities_bytes), FillRates(capacities_bytes), 0
    held = [0] * len(capacities_bytes)
    for size_bytes in sizes_bytes:
        order = turns.order(place)
        drive = next(each for each in order if not rates.is_ahead(each, order))
        place = turns.after(place, drive)
        rates.stored(drive, size_bytes)
        held[drive] += size_bytes
    return [bytes_ / most for bytes_, most in zip(held, capacities_bytes, strict=True)]


@given(st.lists(st.integers(1, 32 << 20), min_size=1, max_size=300))
def test_no_drive_is_given_more_than_its_part_whatever_the_sizes(sizes_bytes: list[int]) -> None:
    filled = stored([2 * GIB, 2 * GIB, 4 * GIB, 8 * GIB], sizes_bytes)
    assert max(filled) - min(filled) <= 1 / 64 + max(sizes_bytes) / (2 * GIB)


BOTH = (DriveNo(0), DriveNo(1))


def test_a_drive_is_ahead_of_those_that_get_blocks() -> None:
    rates = FillRates([GIB, GIB, GIB])
    for drive in BOTH:
        rates.stored(drive, GIB // 32)
    assert rates.is_ahead(DriveNo(0), (*BOTH, DriveNo(2)))
    assert not rates.is_ahead(DriveNo(0), BOTH)


def test_a_drive_that_was_away_is_not_given_all_at_once() -> None:
    rates = FillRates([GIB, GIB])
    rates.stored(DriveNo(0), 100 * GIB)
    assert rates.is_ahead(DriveNo(0), BOTH)
    rates.stored(DriveNo(1), GIB // 16)
    assert not rates.is_ahead(DriveNo(0), BOTH)


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=12).filter(any), st.integers(0, 900))
def test_an_order_has_each_drive_that_can_hold_anything_once(sizes: list[int], place: int) -> None:
    order = DriveTurns(sizes).order(place)
    assert sorted(order) == [drive for drive, size in enumerate(sizes) if size]


def test_who_passes_a_turn_over_goes_on_behind_the_one_that_is_taken() -> None:
    turns = DriveTurns([GIB] * 4)
    place = turns.after(0, DriveNo(2))
    assert turns.order(place) == [3, 0, 1, 2]
