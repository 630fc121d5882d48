"""The figures of a store: what it holds, in which states, what may be evicted, who holds it.

They are for `kvfs status`, and for statfs(2): what clients can still store.
"""

import stat
from itertools import islice
from typing import Any, Final, NamedTuple

from kvfs.core.account import TenantId
from kvfs.core.blocks_ahead import BlocksAhead
from kvfs.core.chains import LINK_BYTES
from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import State, label
from kvfs.core.sizes import format_size
from kvfs.core.types import PAGE_BYTES, InodeNo
from kvfs.engine.device_watch import drive_figures, whole_wear
from kvfs.engine.eviction.overrun_watch import OverrunWatch
from kvfs.engine.eviction.reclaim import Reclaim
from kvfs.engine.eviction.units import Units
from kvfs.engine.store import Store
from kvfs.machine.processes import program_of
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.pool import Pool
from kvfs.pool.rules.leases import LeaseShares
from kvfs.pool.rules.paths import path_of
from kvfs.pool.space.device_probe import worst_answer

#: If less than this share of the capacity is evictable, the operator is warned.
_LOW_SHARE: Final = 0.1
#: Rows checked to find the directory that holds most, at 4 us each; requests wait for it.
_LOOKED_AT_MAX: Final = 1024
#: Units whose files are counted, of up to a thousand names each.
_UNITS_MAX: Final = 8
_WARNING: Final = "almost nothing is evictable: {} holds {} that is pinned, leased or open"
_SLABS: Final = frozenset({State.SLAB, State.REWRITTEN})
#: Tenants whose accounts are shown.
_TENANTS_SHOWN: Final = 64
#: Blocks and bytes by state.
StateTotals = dict[str, dict[str, int]]


class Totals(NamedTuple):
    """What statfs answers, in units of PAGE_BYTES and in inodes."""

    blocks: int
    blocks_free: int
    inodes: int
    inodes_free: int


def statfs_totals(pool: Pool, uid: int, ino: InodeNo) -> Totals:
    """Return the pool's size and what is free.

    The totals do not change while mounted, but when a drive fails or is emptied.

    If the tenant that has what user *uid* stores at *ino* has a quota, that is its size, and what
    it keeps from eviction is taken.
    """
    space, counters, accounts = pool.space.taken, pool.counters, pool.space.accounts
    size_bytes, free_bytes = space.capacity_bytes, available_bytes(pool)
    tenant = _stores_at(pool, ino) or accounts.tenants[uid]
    quota_bytes = accounts.entitlements.of(tenant).quota_bytes
    if quota_bytes is not None and quota_bytes < size_bytes:
        size_bytes = quota_bytes
        free_bytes = min(free_bytes, max(0, quota_bytes - accounts.held.by(tenant)))
    inodes = max(space.capacity_bytes // PAGE_BYTES, 1 << 20)
    taken = counters.blocks + counters.directories + counters.symlinks + counters.others
    return Totals(
        blocks=size_bytes // PAGE_BYTES,
        blocks_free=free_bytes // PAGE_BYTES,
        inodes=inodes,
        inodes_free=max(0, inodes - taken),
    )


def _stores_at(pool: Pool, ino: InodeNo) -> TenantId | None:
    """Return the directory's tenant that has what is stored at *ino*; None: its owner's has it."""
    record = pool.index.inode_or_miss(ino)
    if record is None:
        return None
    return pool.rules.tenants.below(ino if stat.S_ISDIR(record.mode) else record.parent)


def kept_bytes(pool: Pool) -> int:
    """Return the bytes of clients' data. Removed blocks give way, so they count as free."""
    space = pool.space.taken
    used_bytes = space.used_bytes + space.deleted_open_bytes - pool.departures.removed.held_bytes
    return min(used_bytes, space.capacity_bytes)


def available_bytes(pool: Pool) -> int:
    """Return what clients can still store: what is free, and what would be evicted for it."""
    bound_bytes = pool.space.taken.bound_bytes
    free_bytes = max(0, bound_bytes - kept_bytes(pool))
    return min(bound_bytes, free_bytes + pool.evictable_bytes)


def for_blocks_bytes(pool: Pool) -> int:
    """Return the bytes that blocks of a full pool hold: all but headroom and ready extents."""
    return pool.space.taken.bound_bytes - headroom_bytes(pool) - pool.space.taken.ready_bytes


def headroom_bytes(pool: Pool) -> int:
    """Return the bytes that are kept free ahead of writers, on all drives."""
    now_s = pool.monotonic_s()
    return sum(drive.headroom.target_bytes(now_s) for drive in pool.space.drives.all)


def state_totals(pool: Pool) -> StateTotals:
    """Return blocks and bytes by state, for `kvfs status`.

    Open and leased blocks are counted one by one; all other blocks with a name are published. All
    states but the ready ones add up to the used bytes. Recently removed blocks count as free.
    """
    totals: StateTotals = {}

    def count(state: State, allocated_bytes: int, blocks: int = 1) -> None:
        row = totals.setdefault(label(state), {"blocks": 0, "bytes": 0})
        row["blocks"] += blocks
        row["bytes"] += allocated_bytes

    for state, (blocks, size_bytes) in pool.rules.leases.totals.items():
        if blocks and state is not State.ALIAS:
            count(state, size_bytes, blocks)
    for ino, opened in pool.open.inodes.written.items():
        if opened.gone is None and pool.rules.leases.state_of(ino) is None:
            record = pool.index.inode_or_miss(ino)
            if record is not None and label(State(record.state)) != "published":
                count(State(record.state), opened.allocated_bytes)
    elsewhere = sum(row["blocks"] for row in totals.values())
    held_bytes = sum(row["bytes"] for row in totals.values())
    gone = gone_totals(pool)
    space, removed = pool.space.taken, pool.departures.removed
    nameless_bytes = gone["bytes"] - space.deleted_open_bytes + removed.held_bytes
    totals["published"] = {
        "blocks": max(0, pool.counters.blocks - elsewhere),
        "bytes": max(0, pool.space.taken.used_bytes - held_bytes - nameless_bytes),
    }
    if gone["blocks"]:
        totals[label(State.GONE)] = gone
    totals["preallocated"] = {
        "blocks": pool.open.ready.count,
        "bytes": pool.space.taken.ready_bytes,
    }
    return totals


def gone_totals(pool: Pool) -> dict[str, int]:
    """Return blocks and bytes of what has lost its name and is still open or mapped."""
    gone = [
        opened.allocated_bytes
        for opened in pool.open.inodes.values()
        if opened.gone is not None and not opened.revoked and stat.S_ISREG(opened.gone.mode)
    ]
    return {
        "blocks": len(gone) + sum(each.unlink_queue.lingering for each in pool.space.drives.all),
        "bytes": sum(gone) + pool.space.taken.deleted_open_bytes,
    }


def reclaim_figures(pool: Pool, reclaim: Reclaim, watch: OverrunWatch) -> dict[str, Any]:
    """Return the figures, in bytes and counts."""
    space = pool.space.taken
    totals = pool.rules.leases.totals
    open_by = _open_by(pool.open.inodes)
    evictable_bytes = pool.evictable_bytes - pool.in_use_bytes()
    directory, held_bytes = holder(pool)
    low = space.unclaimed_bytes + evictable_bytes < _LOW_SHARE * space.capacity_bytes
    return {
        "evictable_bytes": evictable_bytes,
        "leased_bytes": totals[State.LEASED][1],
        "largest_lease_holder": _lessee(pool.rules.leases.shares),
        "lease_max_bytes": pool.rules.leases.shares.bound_bytes,
        "slab_bytes": sum(totals[state][1] for state in _SLABS),
        "pinned_bytes": pool.rules.heat.held_bytes[Rank.KEPT],
        "open_bytes": sum(held["bytes"] for held in open_by.values()),
        "open_by": open_by,
        "pending_delete_bytes": space.pending_delete_bytes,
        "deleted_open_bytes": gone_totals(pool)["bytes"],
        "headroom_bytes": headroom_bytes(pool),
        "overcommitted_bytes": space.overcommitted_bytes,
        "eviction": {
            "policy": pool.rules.heat.policy.name,
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


def _open_by(inodes: OpenInodes) -> dict[str, dict[str, int]]:
    """Return who has files open: file servers alone, or processes of this machine as well."""
    held = {"processes": {"files": 0, "bytes": 0}, "file_servers": {"files": 0, "bytes": 0}}
    for opened in inodes.values():
        handles = opened.readers + opened.writers
        served = opened.served_readers + opened.served_writers
        row = held["file_servers" if served == handles else "processes"]
        row["files"] += 1
        row["bytes"] += opened.allocated_bytes
    return held


def _lessee(shares: LeaseShares) -> dict[str, Any] | None:
    """Return the process with the most leases; pid 0 stands for all that cannot be watched."""
    if (most := shares.most()) is None:
        return None
    return {
        "pid": most.maker.tgid,
        "program": program_of(most.maker.tgid),
        "bytes": most.held_bytes,
        "stores_refused": shares.refused,
    }


def unit_figures(pool: Pool, units: Units) -> dict[str, Any]:
    """Return how many units there are, what they hold, and which are too large to be one.

    Of those that settings make, only the ones that an attribute makes, too, are known here.
    """
    roots = pool.rules.units.all()
    names = held_bytes = 0
    too_large: list[str] = []
    for root in roots[:_UNITS_MAX]:
        size = units.size(root)
        names, held_bytes = names + size.names, held_bytes + size.size_bytes
        if size.is_too_large:
            too_large.append(path_of(pool.index, root))
    return {"units": len(roots), "files": names, "bytes": held_bytes, "too_large": too_large}


def holder(pool: Pool) -> tuple[str, int]:
    """Return the directory with the most bytes that cannot be evicted, and these, by a sample."""
    held: dict[InodeNo, int] = {}
    some = islice(pool.rules.leases.rows(), _LOOKED_AT_MAX)
    inos: dict[InodeNo, int] = {ino: holding.allocated_bytes for ino, holding in some}
    inos.update((ino, opened.allocated_bytes) for ino, opened in pool.open.inodes.written.items())
    for ino, size_bytes in inos.items():
        opened = pool.open.inodes.get(ino)
        gone = opened.gone if opened is not None else None
        record = gone or pool.index.inode_or_miss(ino)
        if record is not None:
            held[record.parent] = held.get(record.parent, 0) + size_bytes
    for ino, size_bytes in islice(pool.rules.pins.rows(), _LOOKED_AT_MAX):
        record = pool.index.inode_or_miss(ino)
        if record is not None:
            parent = ino if stat.S_ISDIR(record.mode) else record.parent
            held[parent] = held.get(parent, 0) + size_bytes
    if not held:
        return "/", 0
    most = max(held, key=lambda directory: held[directory])
    return path_of(pool.index, most), held[most]


def hint_figures(pool: Pool) -> dict[str, dict[str, int]]:
    """Return what hints and chains do: bytes now, and counts since the start."""
    counts, ahead, links = pool.rules.hints.counts, BlocksAhead(), 0
    if (chains := pool.open.chains) is not None:
        ahead, links = chains.ahead, chains.links.links
    return {
        "hints": {
            "retained_bytes": pool.rules.heat.held_bytes[Rank.RETAINED],
            "taken": counts.taken,
            "clipped": counts.clipped,
            "unknown": counts.unknown,
            "refused": counts.refused,
            "fetched": counts.fetched,
            "kept_hits": pool.rules.heat.kept_hits,
        },
        "prefetch": {
            "links": links,
            "link_bytes": links * LINK_BYTES,
            "read": ahead.read,
            "read_bytes": ahead.read_bytes,
            "used": ahead.used,
            "wasted": ahead.wasted,
            "cached": ahead.cached,
        },
    }


def tree_figures(pool: Pool) -> dict[str, int]:
    """Return how many names of each kind there are, and what the index takes of its room."""
    return {
        "blocks": pool.counters.blocks,
        "directories": pool.counters.directories,
        "symlinks": pool.counters.symlinks,
        "index_used_bytes": pool.index.room.rows_bytes(),
        "index_map_bytes": pool.index.room.map_bytes,
    }


def store_figures(store: Store) -> dict[str, Any]:
    """Return the figures `kvfs status` shows, in bytes and counts."""
    pool, space = store.pool, store.pool.space.taken
    return {
        "uuid": pool.device.uuid,
        "root": store.attributes.describe_root(),
        "capacity_bytes": space.capacity_bytes,
        "used_bytes": kept_bytes(pool),
        "drives": drive_figures(pool, store.device_watch.drives, store.device_wears),
        "missing_drives": sum(drive.is_lacking for drive in pool.space.drives.all),
        "usable_bytes": space.bound_bytes,
        "free_bytes": max(0, space.bound_bytes - kept_bytes(pool)),
        "preallocated_bytes": space.ready_bytes,
        "old_version_bytes": store.blocks.truncating.old_version_bytes,
        **reclaim_figures(pool, store.reclaim, store.watch),
        "together": unit_figures(pool, store.reclaim.units),
        **hint_figures(pool),
        "probation": store.probation_ends.describe(),
        "gate": store.gate.describe(),
        "held_by": pool.figures.held.shown(),
        "tenants": pool.space.accounts.shown(_TENANTS_SHOWN, for_blocks_bytes(pool)),
        "cache": {
            **pool.figures.shown(space.capacity_bytes, for_blocks_bytes(pool)),
            "device": whole_wear(store.device_wears),
        },
        "store_times": pool.figures.store_times.shown(),
        **tree_figures(pool),
        "open_inodes": len(pool.open.inodes),
        "preallocated_extents": pool.open.ready.count,
        "preallocated_hits": pool.open.ready.hits,
        "preallocated_misses": pool.open.ready.misses,
        "recently_deleted": len(pool.departures.removed),
        "states": state_totals(pool),
        "torn_blocks": store.blocks.publishing.torn,
        "unverified_blocks": store.blocks.doubts.unproven + store.blocks.lease_ends.unproven,
        "background_backlog": pool.background.backlog,
        "background_failures": pool.background.failures,
        "follow_failures": pool.followers.failures,
        "lost_blocks": pool.lost_blocks,
        "write_back_failures": store.device_watch.failures + store.durable_pass.failures,
        "durability": store.durable_pass.describe(),
        "strays": pool.space.strays.describe(pool.age_clock.now_ns()),
        "checksums": store.durable_pass.checksum_counts() | store.verifier.describe(),
        "damaged_rows": pool.damage.misses,
        **worst_answer(pool.space.probes.all),
        **pool.durable.index_log.describe(pool.monotonic_s()),
        "reconcile": store.reconcile.describe(),
    }
