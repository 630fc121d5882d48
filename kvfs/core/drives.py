"""The drives of a pool: which one holds an inode's file, and which gets the next. Pure.

An inode number of a pool with several drives is the drive's number in its high bits, and a serial
number below. Serial numbers are given out in one row for all drives: of two inodes the one with the
lower is the older, whichever drives they are on. A pool of one drive has no bits for it: all of the
number is serial. So it is the same as one of drive 0.

What is on each, as the index counts it: the counters are of the whole pool. Each drive from 1 on
has a row of its own beside them, and the first drive has the rest: so the rows of a pool of one
drive are what they always were.
"""

import functools
import itertools
import math
import stat
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfs.core.changed import Changed
from kvfs.core.errors import Damaged
from kvfs.core.records import Counters, DriveCount
from kvfs.core.types import FIRST_DRIVE, DriveNo, InodeNo, InodeRecord

T_co = TypeVar("T_co", covariant=True)

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


class ByDrive(Generic[T_co]):
    """One thing for each drive of a pool, in the order of their numbers."""

    def __init__(self, things: Sequence[T_co], lost: Container[DriveNo] = ()) -> None:
        """*lost*: the drives that hold nothing any more."""
        self._lost: Final = lost
        self.all: Final = tuple(things)
        self._drive = Numbering(len(things)).drive
        #: Returns the thing of the drive that holds an inode's file. Raises Damaged if none does.
        self.of: Final[Callable[[InodeNo], T_co]] = self._of if self.all[1:] else self._only

    @property
    def _only(self) -> Callable[[InodeNo], T_co]:
        """A function that returns the first thing: a store asks six times, so it is none of ours.

        The inode is what ``next`` would return at the end, which never comes.
        """
        return functools.partial(next, itertools.repeat(self.all[0]))

    def _of(self, ino: InodeNo) -> T_co:
        drive = self._drive(ino)
        if drive in self._lost:
            raise Damaged(f"inode {ino:#x}: drive {drive} has failed")
        try:
            return self.all[drive]
        except IndexError:
            raise Damaged(f"inode {ino:#x}: the pool has no such drive") from None


#: How many turns there are of all drives together, at most, beside one for each drive.
_TURNS: Final = 64
#: A drive that was given so much more than its part, as a share of what it can hold, is ahead.
_AHEAD: Final = 1 / 64
#: No drive is held to be further behind: one that did not answer for a while, or is new, is not
#: given all at once.
_BEHIND_MOST: Final = 1 / 16


class DriveTurns:
    """The turns of drives, each as often as what it can hold is of the whole.

    So drives of different sizes fill at the same rate. The turns of one are as far apart as they
    can be: each drive earns its weight at every turn, and the one that is owed most has it and pays
    for all (smooth weighted round robin, as in nginx). The turns repeat in one order, in which each
    caller has its own place, from 0 on.
    """

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        """*capacities_bytes*: what each drive can hold, by number; not all of them 0."""
        whole_bytes = sum(capacities_bytes)
        assert whole_bytes > 0, "nothing can be held"
        weights = [
            max(1, round(_TURNS * size_bytes / whole_bytes)) if size_bytes else 0
            for size_bytes in capacities_bytes
        ]
        common = math.gcd(*weights)
        self._turns: Final = _smooth([weight // common for weight in weights])
        self._drives: Final = len(set(self._turns))

    def order(self, place: int) -> list[DriveNo]:
        """Return the drives that can hold anything, in the order of their turns from *place* on."""
        found: dict[DriveNo, None] = {}
        while len(found) < self._drives:
            found[self._turns[place % len(self._turns)]] = None
            place += 1
        return list(found)

    def after(self, place: int, drive: DriveNo) -> int:
        """Return the place behind the next turn of *drive* from *place* on."""
        while self._turns[place % len(self._turns)] != drive:
            place += 1
        return (place + 1) % len(self._turns)


def _smooth(weights: list[int]) -> tuple[DriveNo, ...]:
    """Return the drives in turn, each as often as its weight says."""
    owed, whole = [0] * len(weights), sum(weights)
    turns: list[DriveNo] = []
    for _ in range(whole):
        owed = [before + weight for before, weight in zip(owed, weights, strict=True)]
        drive = owed.index(max(owed))
        owed[drive] -= whole
        turns.append(DriveNo(drive))
    return tuple(turns)


class FillRates:
    """How much was stored on each drive of a pool, for what it can hold.

    How large a block will be is not known at its turn. So what was stored is counted, and tells
    which drive is ahead: its blocks would go sooner than those of others.
    """

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        """*capacities_bytes*: what each drive can hold, by number; not all of them 0."""
        self._capacities_bytes: Final = tuple(capacities_bytes)
        #: How often each drive could have been filled with what was stored on it.
        self._filled = [0.0] * len(capacities_bytes)

    def is_ahead(self, drive: DriveNo, among: Iterable[DriveNo]) -> bool:
        """Whether *drive* was given more than its part of what was stored lately.

        *among*: the drives that can hold anything and get blocks now.
        """
        return self._filled[drive] > min(self._filled[each] for each in among) + _AHEAD

    def stored(self, drive: DriveNo, size_bytes: int) -> None:
        """Note that *size_bytes* were stored on *drive*."""
        self._filled[drive] += size_bytes / max(1, self._capacities_bytes[drive])
        least = max(self._filled) - _BEHIND_MOST
        self._filled = [max(filled, least) for filled in self._filled]


#: The new counts of drives from 1 on that a change touches.
Recount = dict[DriveNo, DriveCount]


class DriveCounts:
    """The counts of a pool's drives. Followed change by change, or counted inode by inode."""

    def __init__(self, others: Sequence[DriveCount]) -> None:
        """*others*: the counts of the drives from 1 on, by number."""
        self._drive: Final = Numbering(1 + len(others)).drive
        self._counts = [DriveCount(), *others]
        #: Whether there are drives from 1 on.
        self.several: Final = bool(others)

    def rows(self) -> Recount:
        """Return what the rows of the drives from 1 on are to say."""
        return {DriveNo(at): count for at, count in enumerate(self._counts) if at}

    def of_all(self, counters: Counters) -> list[DriveCount]:
        """Return the counts of all drives, by number, of a pool with *counters*."""
        others = self._counts[1:]
        blocks = counters.blocks - sum(count.blocks for count in others)
        used_bytes = counters.used_bytes - sum(count.used_bytes for count in others)
        return [DriveCount(blocks, used_bytes), *others]

    def after(self, changes: Iterable[Changed]) -> Recount:
        """Return the new counts of the drives that *changes* touch; nothing changes here yet."""
        recount: Recount = {}
        for changed in changes:
            drive = self._drive(changed.ino)
            if drive == FIRST_DRIVE or drive >= len(self._counts):
                continue
            count = recount.get(drive, self._counts[drive])
            count = _counted(count, changed.before, -1)
            recount[drive] = _counted(count, changed.after, 1)
        return recount

    def count(self, ino: InodeNo, record: InodeRecord) -> None:
        """Count one more inode: for a count that begins at zero."""
        drive = self._drive(ino)
        if FIRST_DRIVE < drive < len(self._counts):
            self._counts[drive] = _counted(self._counts[drive], record, 1)

    def learn(self, recount: Recount) -> None:
        """Let the counts be those that ``after`` returned: they are in the index."""
        for drive, count in recount.items():
            self._counts[drive] = count


def _counted(count: DriveCount, record: InodeRecord | None, step: int) -> DriveCount:
    if record is None or not stat.S_ISREG(record.mode):
        return count
    used_bytes = count.used_bytes + step * record.allocated_bytes
    return DriveCount(count.blocks + step, used_bytes)
