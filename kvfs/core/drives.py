"""The drives of a pool: which one holds an inode's file, and which gets the next. Pure.

An inode number of a pool with several drives is the drive's number in its high bits, and a serial
number below. Serial numbers are given out in one row for all drives: of two inodes the one with the
lower is the older, whichever drives they are on. A pool of one drive has no bits for it: all of the
number is serial. So it is the same as one of drive 0.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfs.core.errors import Damaged
from kvfs.core.types import DriveNo, InodeNo

T = TypeVar("T")

#: A pool has at most so many drives.
DRIVES_MAX: Final = 256
#: A copy of a pool skips up to 2**40 serial numbers. With the drive a number has 62 bits, since the
#: list of what is not durable keeps two bits beside each (outliving.py).
_SERIAL_BITS: Final = 54
#: Serial numbers of a pool with several drives are below.
SERIAL_END: Final = InodeNo(1 << _SERIAL_BITS)
#: With one drive no number has bits from here on.
_ALL_BITS: Final = 64


class Numbering:
    """What the inode numbers of a pool with so many drives mean."""

    def __init__(self, drives: int) -> None:
        assert 0 < drives <= DRIVES_MAX, drives
        self._shift = _SERIAL_BITS if drives > 1 else _ALL_BITS
        self._mask = (1 << self._shift) - 1

    def drive(self, ino: InodeNo) -> DriveNo:
        """Return the number of the drive that holds *ino*'s file."""
        return DriveNo(ino >> self._shift)

    def drives(self, inos: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the number of the drive that holds each file of *inos*."""
        if self._shift == _ALL_BITS:
            return np.zeros_like(inos)
        numbers: NDArray[np.uint64] = inos >> np.uint64(self._shift)
        return numbers

    def serial(self, ino: InodeNo) -> InodeNo:
        """Return the serial number of *ino*, which is its number on drive 0."""
        return InodeNo(ino & self._mask)

    def inode(self, drive: DriveNo, serial: InodeNo) -> InodeNo:
        """Return the number of the inode *serial* on *drive*."""
        return InodeNo(drive << self._shift | serial)


class ByDrive(Generic[T]):
    """One thing for each drive of a pool, in the order of their numbers."""

    def __init__(self, things: Sequence[T]) -> None:
        self.all: Final = tuple(things)
        self._drive = Numbering(len(things)).drive
        only = self.all[0]
        #: Returns the thing of the drive that holds an inode's file. Raises Damaged if none does.
        self.of: Final[Callable[[InodeNo], T]] = self._of if self.all[1:] else lambda _: only

    def _of(self, ino: InodeNo) -> T:
        try:
            return self.all[self._drive(ino)]
        except IndexError:
            raise Damaged(f"inode {ino:#x}: the pool has no such drive") from None


#: A drive that was given so much more than its part, as a share of what it can hold, is ahead.
_AHEAD: Final = 1 / 64
#: No drive is held to be further behind: one that did not answer for a while, or is new, is not
#: given all at once.
_BEHIND_MOST: Final = 1 / 16


class DriveTurns:
    """Takes drives in turn, each as often as what it can hold is of the whole.

    So drives of different sizes fill at the same rate. The turns of one are as far apart as they
    can be: each drive earns its weight at every turn, and the one that is owed most has it and pays
    for all (smooth weighted round robin, as in nginx).

    How large a block will be is not known at its turn. So what was stored is counted as well, and
    tells which drive is ahead: its blocks would go sooner than those of others.
    """

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        """*capacities_bytes*: what each drive can hold, by number; not all of them 0."""
        self._weights: Final = tuple(capacities_bytes)
        self._whole: Final = sum(capacities_bytes)
        self._owed = [0] * len(self._weights)
        #: How often each drive could have been filled with what was stored on it.
        self._filled = [0.0] * len(self._weights)
        assert self._whole > 0, "nothing can be held"

    def order(self) -> list[DriveNo]:
        """Return the drives that can hold anything: first the one whose turn it is."""
        due = [owed + weight for owed, weight in zip(self._owed, self._weights, strict=True)]
        able = (drive for drive, weight in enumerate(self._weights) if weight)
        return [DriveNo(drive) for drive in sorted(able, key=lambda drive: -due[drive])]

    def is_ahead(self, drive: DriveNo) -> bool:
        """Whether *drive* was given more than its part of what was stored lately."""
        filled = (self._filled[each] for each, weight in enumerate(self._weights) if weight)
        return self._filled[drive] > min(filled) + _AHEAD

    def stored(self, drive: DriveNo, size_bytes: int) -> None:
        """Note that *size_bytes* were stored on *drive*."""
        self._filled[drive] += size_bytes / max(1, self._weights[drive])
        least = max(self._filled) - _BEHIND_MOST
        self._filled = [max(filled, least) for filled in self._filled]

    def took(self, drive: DriveNo) -> None:
        """Note that *drive*, whose turn it was or that had room, got what was to be placed."""
        for each, weight in enumerate(self._weights):
            self._owed[each] += weight
        self._owed[drive] -= self._whole
