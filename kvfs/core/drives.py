"""The drives of a pool: which one holds an inode's file, and which gets the next. Pure.

An inode number of a pool with several drives is the drive's number in its high bits, and a serial
number below. Serial numbers are given out in one row for all drives: of two inodes the one with the
lower is the older, whichever drives they are on. A pool of one drive has no bits for it: all of the
number is serial. So it is the same as one of drive 0.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

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


class DriveTurns:
    """Takes drives in turn, each as often as what it can hold is of the whole.

    So drives of different sizes fill at the same rate. The turns of one are as far apart as they
    can be: each drive earns its weight at every turn, and the one that is owed most has it and pays
    for all (smooth weighted round robin, as in nginx).
    """

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        """*capacities_bytes*: what each drive can hold, by number; not all of them 0."""
        self._weights: Final = tuple(capacities_bytes)
        self._whole: Final = sum(capacities_bytes)
        self._owed = [0] * len(self._weights)
        assert self._whole > 0, "nothing can be held"

    def next(self) -> DriveNo:
        """Return the drive whose turn it is."""
        for drive, weight in enumerate(self._weights):
            self._owed[drive] += weight
        drive = self._owed.index(max(self._owed))
        self._owed[drive] -= self._whole
        return DriveNo(drive)
