"""Which names are too many: of blocks without bytes, and of nodes that never go."""

from kvfs.core import node_bound
from kvfs.core.errors import NoSpace
from kvfs.pool.pool import Pool


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
