"""How large a pool is, what clients store in it, and what they can still store (statfs(2))."""

from typing import NamedTuple

from kvfs.core.types import PAGE_BYTES
from kvfs.pool.pool import Pool


class Totals(NamedTuple):
    """What statfs answers, in units of PAGE_BYTES and in inodes."""

    blocks: int
    blocks_free: int
    inodes: int
    inodes_free: int


def totals(pool: Pool) -> Totals:
    """Return the pool's size and what is free. The totals do not change while mounted."""
    space, counters = pool.space, pool.counters
    inodes = max(space.capacity_bytes // PAGE_BYTES, 1 << 20)
    taken = counters.blocks + counters.directories + counters.symlinks + counters.others
    return Totals(
        blocks=space.capacity_bytes // PAGE_BYTES,
        blocks_free=available_bytes(pool) // PAGE_BYTES,
        inodes=inodes,
        inodes_free=max(0, inodes - taken),
    )


def kept_bytes(pool: Pool) -> int:
    """Return the bytes of clients' data. Removed blocks give way, so they count as free."""
    space = pool.space
    used_bytes = space.used_bytes + space.deleted_open_bytes - pool.recently_removed.held_bytes
    return min(used_bytes, space.capacity_bytes)


def available_bytes(pool: Pool) -> int:
    """Return what clients can still store: what is free, and what would be evicted for it."""
    bound_bytes = pool.space.bound_bytes
    free_bytes = max(0, bound_bytes - kept_bytes(pool))
    return min(bound_bytes, free_bytes + pool.evictable_bytes)


def for_blocks_bytes(pool: Pool) -> int:
    """Return the bytes that blocks of a full pool hold: all but headroom and ready extents."""
    headroom_bytes = pool.headroom.target_bytes(pool.monotonic_s())
    return pool.space.bound_bytes - headroom_bytes - pool.space.ready_bytes
