"""Which row of the heat an inode has: a hash table in arrays."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_PARTS: Final = 256
_PARTS_MASK: Final = _PARTS - 1
_SLOTS_MIN: Final = 32
#: Multiplicative hashing by a prime near 2**32 / the golden ratio: inode numbers rise one by one,
#: and the middle bits of the products are spread evenly.
_SPREAD: Final = 0x9E3779B1
_SHIFT: Final = 24


class RowTable:
    """Finds the row of an inode in the columns: a hash table in arrays, some 8 bytes per inode.

    A dict of a million inodes takes 100 MB; this one takes a tenth of it. Open addressing with
    linear probing, in parts that grow one by one, so that no insert waits for a million rows to
    move. A slot holds a row's number; 0 means empty, so row 0 is not used.
    """

    def __init__(self) -> None:
        self._parts = [memoryview(bytearray(4 * _SLOTS_MIN)).cast("I") for _ in range(_PARTS)]
        self._used = [0] * _PARTS
        #: The inode number of each row: a column that the caller keeps.
        self.inos = memoryview(b"").cast("Q")

    def find(self, ino: int) -> int:
        """Return the row of *ino*, or 0."""
        part = self._parts[ino & _PARTS_MASK]
        mask = len(part) - 1
        slot = ino * _SPREAD >> _SHIFT & mask
        while row := part[slot]:
            if self.inos[row] == ino:
                return row
            slot = slot + 1 & mask
        return 0

    def add(self, ino: int, row: int) -> None:
        """Add *ino*, which must be new; the column must have it in *row* already."""
        number = ino & _PARTS_MASK
        part = self._parts[number]
        self._used[number] += 1
        if 2 * self._used[number] > len(part):
            rows = np.asarray(part)
            self._fill(number, rows[rows != 0], 2 * len(part))
            part = self._parts[number]
        mask = len(part) - 1
        slot = ino * _SPREAD >> _SHIFT & mask
        while part[slot]:
            slot = slot + 1 & mask
        part[slot] = row

    def remove(self, ino: int) -> int:
        """Forget *ino*, which the column must still have; return its row, or 0."""
        number = ino & _PARTS_MASK
        part, inos = self._parts[number], self.inos
        mask = len(part) - 1
        slot = ino * _SPREAD >> _SHIFT & mask
        while (row := part[slot]) and inos[row] != ino:
            slot = slot + 1 & mask
        if not row:
            return 0
        self._used[number] -= 1
        # Rows in the slots after it, up to an empty one, move into the gap if a search passes it.
        gap = slot
        slot = slot + 1 & mask
        while other := part[slot]:
            home = inos[other] * _SPREAD >> _SHIFT & mask
            if slot - home & mask >= slot - gap & mask:
                part[gap] = other
                gap = slot
            slot = slot + 1 & mask
        part[gap] = 0
        return row

    def rebuild(self, column: NDArray[np.uint64]) -> None:
        """Replace the table by one of all inodes in *column*; rows with 0 are skipped."""
        self.inos = column.data
        rows = np.flatnonzero(column).astype(np.uint32)
        number_of = column[rows] & np.uint64(_PARTS_MASK)
        order = np.argsort(number_of, kind="stable")
        ends = np.searchsorted(number_of[order], np.arange(_PARTS + 1))
        for number in range(_PARTS):
            held = rows[order[ends[number] : ends[number + 1]]]
            slots = _SLOTS_MIN
            while 2 * len(held) > slots:
                slots *= 2
            self._used[number] = len(held)
            self._fill(number, held, slots)

    def _fill(self, number: int, rows: NDArray[np.uint32], slots: int) -> None:
        """Replace part *number* by one with *slots* slots that holds *rows*."""
        spread = np.asarray(self.inos)[rows] * np.uint64(_SPREAD)
        home = spread >> np.uint64(_SHIFT) & np.uint64(slots - 1)
        order = np.argsort(home)
        rows = rows[order]
        # Each in its home slot or after the one before it; those past the end wrap around.
        steps = np.arange(len(rows))
        slot = np.maximum.accumulate(home[order].astype(np.int64) - steps) + steps
        fits = slot < slots
        part = np.zeros(slots, np.uint32)
        part[slot[fits]] = rows[fits]
        view = self._parts[number] = part.data
        at = 0
        for row in rows[~fits].tolist():
            while view[at]:
                at += 1
            view[at] = row
