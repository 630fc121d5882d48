"""Limits on new names: of inodes that are never evicted, and of leased blocks."""

from kvfs.core import node_bound
from kvfs.core.errors import NoSpace
from kvfs.core.lifecycle import is_temporary
from kvfs.core.types import InodeNo
from kvfs.machine.processes import Maker
from kvfs.pool.pool import Pool


def require_node(pool: Pool, uid: int) -> None:
    """Raise NoSpace if user *uid*, unless root, has too much of what is never evicted."""
    if not uid:
        return
    index_room = pool.index.room
    taken_bytes = node_bound.taken_bytes(pool.counters, index_room.rows_bytes())
    # Such inodes must not take the index's map from the names of blocks, nor the device from their
    # bytes, also where others use a part of the device.
    whole_bytes = min(pool.space.usable_bytes, index_room.map_bytes)
    if pool.node_shares.refuses(uid, taken_bytes, whole_bytes):
        raise NoSpace("directories, symlinks and attributes have their share of the pool")


def require_lease(pool: Pool, parent: InodeNo, name: bytes, uid: int, maker: Maker) -> None:
    """Raise NoSpace for a process over its share of leases, if its store will be leased.

    That is under a final name; where only a rename publishes, under any name.
    """
    policy = pool.policies.of(parent)
    if is_temporary(name) and not policy.only_renamed:
        return
    if (policy.leases or policy.only_renamed) and pool.leases.shares.refuses(uid, maker):
        pool.leases.shares.refused += 1
        raise NoSpace(f"process {maker.tgid} has more leases than its share (lease_max)")
