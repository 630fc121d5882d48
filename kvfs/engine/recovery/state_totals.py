"""How many blocks, and how many bytes of the device, are in each state of their life."""

import stat

from kvfs.core.lifecycle import State, label
from kvfs.pool.pool import Pool

Totals = dict[str, dict[str, int]]


def state_totals(pool: Pool) -> Totals:
    """Return blocks and bytes by state, for `kvfs status`.

    Open and leased blocks are counted one by one; all other blocks with a name are published. All
    states but the ready ones add up to the used bytes. Recently removed blocks count as free.
    """
    totals: Totals = {}

    def count(state: State, allocated_bytes: int, blocks: int = 1) -> None:
        row = totals.setdefault(label(state), {"blocks": 0, "bytes": 0})
        row["blocks"] += blocks
        row["bytes"] += allocated_bytes

    for state, (blocks, size_bytes) in pool.leases.totals.items():
        if blocks:
            count(state, size_bytes, blocks)
    for ino, opened in pool.open_inodes.written.items():
        if opened.gone is None and pool.leases.state_of(ino) is None:
            record = pool.index.inode_or_miss(ino)
            if record is not None and label(State(record.state)) != "published":
                count(State(record.state), opened.allocated_bytes)
    elsewhere = sum(row["blocks"] for row in totals.values())
    held_bytes = sum(row["bytes"] for row in totals.values())
    gone = gone_totals(pool)
    space, removed = pool.space, pool.recently_removed
    nameless_bytes = gone["bytes"] - space.deleted_open_bytes + removed.held_bytes
    totals["published"] = {
        "blocks": max(0, pool.counters.blocks - elsewhere),
        "bytes": max(0, pool.space.used_bytes - held_bytes - nameless_bytes),
    }
    if gone["blocks"]:
        totals[label(State.GONE)] = gone
    totals["preallocated"] = {"blocks": pool.ready.count, "bytes": pool.space.ready_bytes}
    return totals


def gone_totals(pool: Pool) -> dict[str, int]:
    """Return blocks and bytes of what has lost its name and is still open or mapped."""
    gone = [
        opened.allocated_bytes
        for opened in pool.open_inodes.values()
        if opened.gone is not None and not opened.revoked and stat.S_ISREG(opened.gone.mode)
    ]
    return {
        "blocks": len(gone) + pool.unlink_queue.lingering,
        "bytes": sum(gone) + pool.space.deleted_open_bytes,
    }
