"""Space for one more name: in the index's map, in its file, and in the user's share of nodes."""

import contextlib
from typing import Final

from kvfs.core import node_bound
from kvfs.core.errors import NoSpace
from kvfs.pool.pool import Pool

#: So much is made free at a time for the index, which grows some bytes a name.
_STEP_BYTES: Final = 4 << 20


def require_name(pool: Pool) -> None:
    """Have blocks go if the index would refuse one name more; it says so itself."""
    room = pool.index.room
    if room.crowded:
        pool.evict_names()
        if room.crowded:
            _grow_index(pool)


def _grow_index(pool: Pool) -> None:
    """Have the device give the index more; blocks go for it."""
    with contextlib.suppress(NoSpace):
        try:
            pool.index.preallocate()
        except NoSpace:
            make_index_room(pool)
            pool.index.preallocate()
    pool.index.room.look()


def make_index_room(pool: Pool) -> None:
    """Have blocks go for the index's file, as many as may. Raises OSError."""
    with contextlib.suppress(NoSpace):
        pool.find_device_room(_STEP_BYTES)


def empty_names_too_many(pool: Pool) -> int:
    """Return how many blocks without bytes are to go for blocks with bytes.

    Each takes an inode and rows of the device, and nothing of what the capacity counts. Where the
    device has the capacity all the same, they are in nobody's way.
    """
    space = pool.space
    if space.bound_bytes >= space.capacity_bytes:
        return 0
    return node_bound.names_too_many(pool.counters, space.capacity_bytes)


def require_node(pool: Pool, uid: int) -> None:
    """Raise NoSpace if user *uid* is to make nothing more that never goes. Not for root."""
    if not uid:
        return
    taken_bytes = node_bound.taken_bytes(pool.counters, pool.index.room.rows_bytes())
    if pool.node_shares.refuses(uid, taken_bytes, pool.space.capacity_bytes):
        raise NoSpace("directories, symlinks and attributes have their share of the pool")
