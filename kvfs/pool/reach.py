"""Whether a request for space can be met at all: from what is free, and what may be evicted.

This is checked before anything is evicted. Otherwise a request that fails in the end could empty
the cache first: an ``fallocate`` of a petabyte, by any user who may create a file.
"""

import enum
from typing import Final

from kvfs.core.eviction_policy import EVICTABLE
from kvfs.pool.open_inodes import OpenInodes
from kvfs.pool.pool import Pool
from kvfs.pool.ports import Room
from kvfs.storage.heat import Heat


def in_use_bytes(open_inodes: OpenInodes, heat: Heat) -> int:
    """Return the bytes of blocks that could be evicted if they were not open."""
    return sum(
        heat.held_as(ino, rank) or 0
        for ino, opened in open_inodes.items()
        if opened.gone is None and not opened.is_revocable
        for rank in EVICTABLE
    )


class Fit(enum.Enum):
    """Whether a request can be met."""

    NOW = enum.auto()
    """Yes, by evicting what may be evicted now."""
    AFTER_USERS = enum.auto()
    """Only with the space of blocks that are open now."""
    AFTER_GUESSES = enum.auto()
    """Only if drafts do not take the space that is kept free for them."""
    LATER = enum.auto()
    """Only once drafts, or blocks without a name, are closed."""
    NEVER = enum.auto()
    """Not while leases, pins and slabs keep their space; or it is more than the pool can hold."""


class Reach:
    """What requests for space can get from one pool.

    An upper bound: that a closed block is still mapped shows only when it is to be evicted.
    """

    def __init__(self, pool: Pool, room: Room) -> None:
        self._pool = pool
        self._room = room
        #: For larger requests open blocks are subtracted. A smaller request evicts no more than is
        #: kept free ahead of writers anyway, so a wrong guess costs little.
        self._counted_from_bytes: Final = pool.headroom.most_bytes

    def fit(self, size_bytes: int) -> Fit:
        """Return whether a request for *size_bytes* can be met, as far as is known now."""
        pool, space = self._pool, self._pool.space
        at_most_bytes = self._at_most_bytes()
        if size_bytes <= at_most_bytes:
            if size_bytes <= self._counted_from_bytes:
                return Fit.NOW
            used_bytes = in_use_bytes(pool.open_inodes, pool.heat)
            return Fit.NOW if size_bytes <= at_most_bytes - used_bytes else Fit.AFTER_USERS
        if size_bytes <= at_most_bytes + space.lacking_bytes:
            return Fit.AFTER_GUESSES
        stays_bytes = max(0, space.recorded_bytes - pool.evictable_bytes)
        if not self._room.all_known:
            stays_bytes = 0  # some of it may be evictable
        return Fit.LATER if size_bytes <= space.bound_bytes - stays_bytes else Fit.NEVER

    def _at_most_bytes(self) -> int:
        """Return the bytes that are free, only held in reserve, or evictable."""
        pool, space = self._pool, self._pool.space
        convenience_bytes = (
            space.ready_bytes
            + space.pending_delete_bytes
            + space.stray_bytes
            + pool.recently_removed.held_bytes
            + self._room.nameless_bytes
        )
        return space.unclaimed_bytes + convenience_bytes + pool.evictable_bytes
