"""The table from inodes to rows against a dict, and the ghosts against what they promise."""

import random
from typing import Final

import numpy as np
import pytest

from kvfs.core.ghosts import Ghosts
from kvfs.storage.row_table import RowTable

ROOM: Final = 5000


@pytest.mark.parametrize("step", [1, 256, 257], ids="inodes {} apart".format)
def test_the_table_is_a_dict(step: int) -> None:
    """Also when all inodes fall into one part of it."""
    draw = random.Random(step)
    column = np.zeros(ROOM, np.uint64)
    table = RowTable()
    table.inos = column.data
    known: dict[int, int] = {}
    free = list(range(1, ROOM))
    ino = 16
    for number in range(20_000):
        if free and (not known or draw.random() < 0.55):
            ino += step * draw.choice([1, 1, 1, 7])
            row = free.pop()
            column[row] = ino
            table.add(ino, row)
            known[ino] = row
        else:
            goes = draw.choice(list(known)) if number % 50 == 0 else next(iter(known))
            row = known.pop(goes)
            assert table.remove(goes) == row
            column[row] = 0
            free.append(row)
        if number % 4000 == 3999:
            assert all(table.find(key) == row for key, row in known.items())
            assert table.find(ino + 1) == table.remove(ino + 1) == 0
            if number % 8000 == 7999:
                table.rebuild(column)
    assert len(known) > 1000


def test_a_row_is_found_in_few_steps_however_the_inodes_lie() -> None:
    """Survivors of long ago, and a long run of new ones: what a full pool looks like."""
    column = np.zeros(200_001, np.uint64)
    column[1:50_001] = np.arange(16, 16 + 7 * 50_000, 7)
    column[50_001:] = np.arange(1 << 40, (1 << 40) + 150_000)
    table = RowTable()
    table.rebuild(column)
    steps = 0
    for part in table._parts:
        slots = np.asarray(part)
        at = np.flatnonzero(slots)
        home = column[slots[at]] * np.uint64(0x9E3779B1) >> np.uint64(24)
        steps += int(((at - (home & np.uint64(len(slots) - 1)).astype(int)) % len(slots)).sum())
    assert steps < 200_000  # less than one step more than the first, on average
    assert all(table.find(int(column[row])) == row for row in range(1, 200_001, 997))


def test_a_ghost_is_found_once() -> None:
    ghosts = Ghosts()
    lives = (100, 100)
    ghosts.remember(5, frequent=False, lives=lives)
    ghosts.remember(6, frequent=True, lives=lives)
    assert ghosts.counts == [1, 1]
    assert ghosts.pop(5, lives) == 0
    assert ghosts.pop(6, lives) == 1
    assert ghosts.pop(5, lives) is None
    assert ghosts.pop(7, lives) is None
    assert ghosts.counts == [0, 0]


def test_a_ghost_fades_after_so_many_of_its_kind() -> None:
    ghosts = Ghosts()
    ghosts.remember(5, frequent=False, lives=(3, 3))
    for name in (20, 21, 22, 23):
        ghosts.remember(name, frequent=True, lives=(3, 3))
    assert ghosts.pop(5, (3, 3)) == 0
    ghosts.remember(5, frequent=False, lives=(3, 3))
    for name in (30, 31, 32):
        ghosts.remember(name, frequent=False, lives=(3, 3))
    assert ghosts.pop(5, (3, 3)) is None


def test_most_ghosts_of_a_large_pool_are_kept_and_their_memory_is_bounded() -> None:
    ghosts = Ghosts()
    draw = random.Random(1)
    names = [draw.getrandbits(32) for _ in range(20_000)]
    for name in names:
        ghosts.remember(name, frequent=False, lives=(20_000, 0))
    kept = sum(ghosts.pop(name, (20_000, 0)) == 0 for name in names)
    assert kept > 0.97 * len(names)
    for name in range(200_000):
        ghosts.remember(name, frequent=True, lives=(0, 100))
    assert len(ghosts._slots) <= 1 << 17
