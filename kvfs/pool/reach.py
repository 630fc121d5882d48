"""Whether a request for space can be met at all: what is free, and what may go for it.

It is asked before anything goes. Otherwise a request that is refused in the end would have emptied
the cache: an ``fallocate`` of a petabyte, by any user who may create a file.
"""

import enum
from typing import Final

from kvfs.core.eviction_policy import EVICTABLE
from kvfs.pool.open_inodes import OpenInodes
from kvfs.pool.pool import Pool
from kvfs.pool.ports import Room
from kvfs.storage.heat import Heat


def in_use_bytes(open_inodes: OpenInodes, heat: Heat) -> int:
    """Return bytes of blocks that could be evicted, but that somebody has open."""
    return sum(
        heat.held_as(ino, rank) or 0
        for ino, opened in open_inodes.items()
        if opened.gone is None and not opened.is_revocable
        for rank in EVICTABLE
    )


class Fit(enum.Enum):
    """Whether a request can be met."""

    NOW = enum.auto()
    """If enough of what may go now goes."""
    AFTER_USERS = enum.auto()
    """Only with the space of blocks that somebody has open."""
    AFTER_GUESSES = enum.auto()
    """Unless drafts take what was kept free for them."""
    LATER = enum.auto()
    """Only once drafts, or blocks without a name, are closed."""
    NEVER = enum.auto()
    """Not beside what is leased, pinned or a slab; or it is more than the pool can hold."""


class Reach:
    """What requests for space can get from one pool.

    It is an upper bound: a block that is mapped, and not open, is seen when it is its turn to go.
    """

    def __init__(self, pool: Pool, room: Room) -> None:
        self._pool = pool
        self._room = room
        #: For more than this all open files are looked at. A smaller request evicts no more than
        #: is kept free ahead of writers anyway, and may take blocks that are open.
        self._counted_from_bytes: Final = pool.headroom.most_bytes

    def fit(self, size_bytes: int) -> Fit:
        """Return whether *size_bytes* can be had; NOW is what is known so far."""
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
            stays_bytes = 0  # some of it may go
        return Fit.LATER if size_bytes <= space.bound_bytes - stays_bytes else Fit.NEVER

    def _at_most_bytes(self) -> int:
        """Return what is free, and what may go: first what is held for convenience."""
        pool, space = self._pool, self._pool.space
        convenience_bytes = (
            space.ready_bytes
            + space.pending_delete_bytes
            + space.stray_bytes
            + pool.recently_removed.held_bytes
            + self._room.nameless_bytes
        )
        return space.unclaimed_bytes + convenience_bytes + pool.evictable_bytes
