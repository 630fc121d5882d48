"""Probation: new blocks are kept in memory, until they prove worth a write to their drive.

A draft goes there if its likely size is known and has room. It is counted on its drive, too, which
so has room for it whenever it moves there (engine/blocks/moves.py). Here is decided what comes;
engine/eviction/probation_ends.py decides what stays.
"""

import contextlib
from collections.abc import Callable
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import NoSpace
from kvfs.core.types import NO_BACKING_ID, InodeNo
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.ready_extents import ReadyExtent
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.memory_files import MemoryFiles

#: The share of the capacity that a draft may take: of larger ones too few could prove anything.
_DRAFT_SHARE: Final = 1 / 8
#: Something waited for memory for this share of the time: the room is halved each second. Long
#: before that becomes 60 % for all, at which systemd-oomd(8) kills by default.
_SCARCE_SHARE: Final = 0.1
#: Below this share of the time it grows again, from nothing to all of it in so many seconds.
_PLENTY_SHARE: Final = 0.01
_GROWS_S: Final = 60


class MemoryRoom:
    """The room, between nothing and *most_bytes*."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes: Final = most_bytes
        self.size_bytes = most_bytes

    def adapt(self, waited_share: float, held_bytes: int) -> None:
        """Change the room; called once a second.

        *waited_share* (0-1): how long something waited for memory. *held_bytes*: what is taken.
        """
        if waited_share >= _SCARCE_SHARE:
            self.size_bytes = min(self.size_bytes, held_bytes) // 2
        elif waited_share < _PLENTY_SHARE:
            grown_bytes = self.size_bytes + max(1, self.most_bytes // _GROWS_S)
            self.size_bytes = min(self.most_bytes, grown_bytes)


class Probation:
    """The room in memory of one pool."""

    follows: Final = frozenset({Why.CLOSED, Why.STORED, Why.TRIMMED, Why.RESERVED})

    def __init__(
        self,
        memory: MemoryFiles,
        extents: Extents,
        numbers: InodeNumbers,
        background: Background,
        inodes: OpenInodes,
        capacity_bytes: int,
    ) -> None:
        """*capacity_bytes*: 0 if nothing more may come, and what an earlier server left goes.

        Raises OSError.
        """
        self.memory: Final = memory
        self.room: Final = MemoryRoom(capacity_bytes)
        self._extents = extents
        self._numbers = numbers
        self._background = background
        self._inodes = inodes
        for ino in self.memory.inos():
            extents.moves.undo(ino)  # the last server was killed before that counted
        #: How many drafts came, and how many would have, if there had been room.
        self.taken = self.refused = 0

    def __contains__(self, ino: InodeNo) -> bool:
        """Whether *ino*'s extent is in memory."""
        return ino in self.memory

    @property
    def free_bytes(self) -> int:
        """The room that is left, below 0 if drafts took more than they were given."""
        return self.room.size_bytes - self.memory.held_bytes

    def give_out(
        self, size_bytes: int, drive: PoolDrive, require_space: Callable[[int, PoolDrive], None]
    ) -> ReadyExtent | None:
        """Return an extent in memory for a draft of *size_bytes*, of an inode of *drive*.

        None: it is to be on the drive. *require_space* makes space there. Raises NotAtHand.
        """
        if not self._admits(size_bytes):
            return None
        with contextlib.suppress(NoSpace, OSError):
            require_space(size_bytes, drive)
            return self._make(drive, size_bytes)
        return None

    def _admits(self, size_bytes: int) -> bool:
        """Whether a draft of *size_bytes* may come; 0: its size is not known."""
        if not 0 < size_bytes <= self.room.most_bytes * _DRAFT_SHARE:
            return False
        fits = size_bytes <= self.free_bytes
        self.refused += not fits
        return fits

    def _make(self, drive: PoolDrive, size_bytes: int) -> ReadyExtent:
        self._numbers.require(at_once=not self._background.is_serving, drive=drive.number)
        ino = self._numbers.give_out(drive.number)
        self.memory.count(ino, size_bytes)
        try:
            fd = self._extents.create(ino, size_bytes)
        except BaseException:
            self.memory.forget(ino)
            raise
        self.taken += 1
        return ReadyExtent(ino, fd, size_bytes, NO_BACKING_ID)

    def lets_grow(self, ino: InodeNo, size_bytes: int) -> bool:
        """Whether *ino*, a draft in memory, may take *size_bytes*; if so, it has them."""
        growth_bytes = size_bytes - self.memory.bytes_of(ino)
        if growth_bytes <= 0:
            return True
        if growth_bytes > self.free_bytes or size_bytes > self.room.most_bytes * _DRAFT_SHARE:
            return False
        self.memory.count(ino, size_bytes)
        return True

    def follow(self, changed: Changed) -> None:
        """Count what a block takes."""
        if changed.after is not None and changed.ino in self.memory:
            self.memory.count(changed.ino, changed.after.allocated_bytes)

    def count_drafts(self) -> None:
        """Count what drafts took since the last tick."""
        for ino, opened in self._inodes.written.items():
            if ino in self.memory and opened.allocated_bytes > self.memory.bytes_of(ino):
                self.memory.count(ino, opened.allocated_bytes)
