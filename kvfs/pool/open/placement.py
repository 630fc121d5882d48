"""Which drive of a pool a new block is put on: the one whose turn it is, or one that has room."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.drives import ByDrive, DriveTurns
from kvfs.pool.open.ready_by_drive import ReadyByDrive
from kvfs.pool.space.drive import PoolDrive


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
        self._turns = DriveTurns([drive.space.capacity_bytes for drive in drives.all])

    def candidates(self, size_bytes: int) -> Sequence[PoolDrive]:
        """Return the drives for a draft of *size_bytes*, the best one first."""
        drives = [self._drives.all[number] for number in self._turns.order()]
        return sorted(drives, key=lambda drive: self._choice(drive, size_bytes))

    def placed(self, drive: PoolDrive) -> None:
        """Note that *drive* got a draft."""
        self._turns.took(drive.number)

    def follow(self, changed: Changed) -> None:
        """Count what was stored on the drive of a block."""
        before, after = changed.before, changed.after
        if after is not None:
            grown_bytes = after.allocated_bytes - (before.allocated_bytes if before else 0)
            self._turns.stored(self._drives.of(changed.ino).number, max(0, grown_bytes))

    def _choice(self, drive: PoolDrive, size_bytes: int) -> _Choice:
        ready, unclaimed_bytes = self._ready.on(drive), drive.space.unclaimed_bytes
        if ready.has_brought(size_bytes):
            return _Choice.BROUGHT
        ahead = self._turns.is_ahead(drive.number)
        if not ahead and (ready.has(size_bytes) or unclaimed_bytes >= max(size_bytes, 1)):
            return _Choice.ROOM
        if unclaimed_bytes >= size_bytes + drive.headroom.most_bytes:
            return _Choice.PLENTY
        return _Choice.AHEAD if ahead else _Choice.FULL
