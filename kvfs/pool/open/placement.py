"""Which drive of a pool a new block is put on: the one whose turn it is, or one that has room.

A *chain* is what one process stores in one directory: the blocks of one model, or of one prompt
after the other. Each chain takes turns of its own, so that a reader of one finds all drives busy,
however many chains are written at once.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.drives import ByDrive, DriveTurns, FillRates
from kvfs.core.types import DriveNo, InodeNo
from kvfs.machine.processes import Maker
from kvfs.pool.open.ready_by_drive import ReadyByDrive
from kvfs.pool.space.drive import PoolDrive

#: A directory, and the process that stores there.
Chain = tuple[InodeNo, Maker]
#: Of so many chains the turns are remembered; the others go on where a new one would begin.
_CHAINS_MAX: Final = 4096


class _Choice(IntEnum):
    """Which drives come before which others; among equals turns decide."""

    #: It has an extent that was made for a create that lacked one, and comes again.
    BROUGHT = 0
    #: It has room, and was given no more than its part.
    ROOM = 1
    #: It was given more, but has much room: nothing is evicted for what it can hold.
    PLENTY = 2
    #: Something must be evicted there.
    FULL = 3
    #: And its blocks would go sooner than those of other drives.
    AHEAD = 4


class Placement:
    """The turns of the drives of a pool that has several."""

    follows: Final = frozenset({Why.CLOSED, Why.STORED})

    def __init__(self, drives: ByDrive[PoolDrive], ready: ReadyByDrive) -> None:
        self._ready: Final = ready
        self._drives: Final = drives
        capacities_bytes = [drive.space.capacity_bytes for drive in drives.all]
        self._turns: Final = DriveTurns(capacities_bytes)
        self._rates: Final = FillRates(capacities_bytes)
        #: Where the next chain begins among the turns, and the place of each, the oldest first.
        self._begin = 0
        self._places: OrderedDict[Chain, int] = OrderedDict()

    def candidates(self, size_bytes: int, chain: Chain | None = None) -> Sequence[PoolDrive]:
        """Return the drives for a draft of *size_bytes* in *chain*, the best one first."""
        place = self._begin if chain is None else self._places.get(chain, self._begin)
        drives = [self._drives.all[number] for number in self._turns.order(place)]
        # One that is slow or silent is passed over until it answers as it should; one that is being
        # emptied, as long as there is another.
        drives = [drive for drive in drives if not drive.has_failed]
        drives = [drive for drive in drives if not drive.is_draining] or drives
        drives = [drive for drive in drives if drive.probe.takes_blocks] or drives
        among = [drive.number for drive in drives]
        return sorted(drives, key=lambda drive: self._choice(drive, size_bytes, among))

    def turn(self, drive: PoolDrive, size_bytes: int, chain: Chain) -> Callable[[], None]:
        """Return what notes that a draft of *size_bytes* in *chain* is to be on *drive*.

        Call it when the draft has its extent, or when one is being made for it. Until then a
        request may ask several times, which is one turn. When it asks again for the extent that
        was made for it, it takes no further turn.
        """
        again = self._ready.on(drive).has_brought(size_bytes)
        return functools.partial(self._take_turn, drive, chain, again=again)

    def _take_turn(self, drive: PoolDrive, chain: Chain, *, again: bool) -> None:
        if again:
            return
        place = self._places.pop(chain, None)
        if place is None:
            place = self._begin
            self._begin = self._turns.after(place, drive.number)
        self._places[chain] = self._turns.after(place, drive.number)
        if len(self._places) > _CHAINS_MAX:
            self._places.popitem(last=False)

    def follow(self, changed: Changed) -> None:
        """Count what was stored on the drive of a block."""
        before, after = changed.before, changed.after
        if after is not None:
            grown_bytes = after.allocated_bytes - (before.allocated_bytes if before else 0)
            self._rates.stored(self._drives.of(changed.ino).number, max(0, grown_bytes))

    def _choice(self, drive: PoolDrive, size_bytes: int, among: Sequence[DriveNo]) -> _Choice:
        ready, unclaimed_bytes = self._ready.on(drive), drive.space.unclaimed_bytes
        if ready.has_brought(size_bytes):
            return _Choice.BROUGHT
        ahead = self._rates.is_ahead(drive.number, among)
        if not ahead and (ready.has(size_bytes) or unclaimed_bytes >= max(size_bytes, 1)):
            return _Choice.ROOM
        if unclaimed_bytes >= size_bytes + drive.headroom.most_bytes:
            return _Choice.PLENTY
        return _Choice.AHEAD if ahead else _Choice.FULL
