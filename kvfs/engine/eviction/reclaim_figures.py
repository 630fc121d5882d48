"""The figures of `kvfs status` about space: what can be evicted, what cannot, and who holds it."""

import stat
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import State
from kvfs.core.sizes import format_size
from kvfs.engine.eviction.overrun_watch import OverrunWatch
from kvfs.engine.eviction.reclaim import Reclaim
from kvfs.engine.recovery.state_totals import gone_totals
from kvfs.machine.processes import program_of
from kvfs.pool.allocator import in_use_bytes
from kvfs.pool.pool import Pool
from kvfs.pool.rules.paths import path_of

if TYPE_CHECKING:
    from kvfs.core.types import InodeNo

#: If less than this share of the capacity is evictable, the operator is warned.
_LOW_SHARE: Final = 0.1
#: Rows checked to find the directory that holds most, at 4 us each; requests wait for it.
_LOOKED_AT_MAX: Final = 1024
_WARNING: Final = "almost nothing is evictable: {} holds {} that is pinned, leased or open"
_SLABS: Final = frozenset({State.SLAB, State.REWRITTEN})


def reclaim_figures(pool: Pool, reclaim: Reclaim, watch: OverrunWatch) -> dict[str, Any]:
    """Return the figures, in bytes and counts."""
    space = pool.space
    totals = pool.leases.totals
    open_by = _open_by(pool)
    evictable_bytes = pool.evictable_bytes - in_use_bytes(pool.open_inodes, pool.heat)
    directory, held_bytes = holder(pool)
    low = space.unclaimed_bytes + evictable_bytes < _LOW_SHARE * space.capacity_bytes
    return {
        "evictable_bytes": evictable_bytes,
        "leased_bytes": totals[State.LEASED][1],
        "largest_lease_holder": _lessee(pool),
        "lease_max_bytes": pool.leases.shares.bound_bytes,
        "slab_bytes": sum(totals[state][1] for state in _SLABS),
        "pinned_bytes": pool.heat.held_bytes[Rank.KEPT],
        "open_bytes": sum(held["bytes"] for held in open_by.values()),
        "open_by": open_by,
        "pending_delete_bytes": space.pending_delete_bytes,
        "deleted_open_bytes": gone_totals(pool)["bytes"],
        "headroom_bytes": pool.headroom.target_bytes(pool.monotonic_s()),
        "overcommitted_bytes": space.overcommitted_bytes,
        "eviction": {
            "policy": pool.heat.policy.name,
            "blocks": reclaim.evicted_blocks,
            "bytes": reclaim.evicted_bytes,
            "batches": reclaim.batches,
            "skipped": reclaim.refusals,
            "overruns": watch.overruns,
            "abandoned_drafts": watch.given_up,
        },
        "largest_unevictable": {"directory": directory, "bytes": held_bytes},
        "warning": _WARNING.format(directory, format_size(held_bytes)) if low else None,
    }


def _open_by(pool: Pool) -> dict[str, dict[str, int]]:
    """Return who has files open: file servers alone, or processes of this machine as well."""
    held = {"processes": {"files": 0, "bytes": 0}, "file_servers": {"files": 0, "bytes": 0}}
    for opened in pool.open_inodes.values():
        handles = opened.readers + opened.writers
        served = opened.served_readers + opened.served_writers
        row = held["file_servers" if served == handles else "processes"]
        row["files"] += 1
        row["bytes"] += opened.allocated_bytes
    return held


def _lessee(pool: Pool) -> dict[str, Any] | None:
    """Return the process with the most leases; pid 0 stands for all that cannot be watched."""
    leases = pool.leases.shares
    if (most := leases.most()) is None:
        return None
    return {
        "pid": most.maker.tgid,
        "program": program_of(most.maker.tgid),
        "bytes": most.held_bytes,
        "stores_refused": leases.refused,
    }


def holder(pool: Pool) -> tuple[str, int]:
    """Return the directory with the most bytes that cannot be evicted, and these, by a sample."""
    held: dict[InodeNo, int] = {}
    some = islice(pool.leases.rows(), _LOOKED_AT_MAX)
    inos: dict[InodeNo, int] = {ino: holding.allocated_bytes for ino, holding in some}
    inos.update((ino, opened.allocated_bytes) for ino, opened in pool.open_inodes.written.items())
    for ino, size_bytes in inos.items():
        opened = pool.open_inodes.get(ino)
        gone = opened.gone if opened is not None else None
        record = gone or pool.index.inode_or_miss(ino)
        if record is not None:
            held[record.parent] = held.get(record.parent, 0) + size_bytes
    for ino, size_bytes in islice(pool.pins.rows(), _LOOKED_AT_MAX):
        record = pool.index.inode_or_miss(ino)
        if record is not None:
            parent = ino if stat.S_ISDIR(record.mode) else record.parent
            held[parent] = held.get(parent, 0) + size_bytes
    if not held:
        return "/", 0
    most = max(held, key=lambda directory: held[directory])
    return path_of(pool.index, most), held[most]
