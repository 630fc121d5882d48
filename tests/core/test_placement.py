"""Placement: drives take turns by what they hold, with the turns of each well apart."""

from collections import Counter

import pytest

from kvfs.core.placement import DriveTurns

GIB = 1 << 30


def taken(capacities_bytes: list[int], turns: int) -> list[int]:
    drives = DriveTurns(capacities_bytes)
    return [drives.next() for _ in range(turns)]


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
