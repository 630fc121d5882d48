"""The eviction rank of a block, from its record, its directory's policy and its pin."""

import stat
from typing import Final

from kvfs.core.checksum import crc32c
from kvfs.core.directory_policy import PIN, Policy
from kvfs.core.errors import Damaged
from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import TABLE, Goes, State
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.name_room import empty_names_too_many
from kvfs.pool.pool import Pool

#: Smaller files are configurations and sidecars: they free little space and cost much to lose.
SMALL_BYTES: Final = 64 << 10


def rank_of(record: InodeRecord, evict: str) -> Rank:
    """Return the rank of a block with *record* under policy *evict*, unless it is kept."""
    goes = TABLE[State(record.state)].goes
    if goes is Goes.NEVER:
        return Rank.NEVER
    if goes is Goes.FIRST or evict == "first":
        return Rank.FIRST
    if goes is Goes.AFTER_LEASES:
        return Rank.ORPHAN_SLAB
    return Rank.SMALL if record.size_bytes < SMALL_BYTES else Rank.PUBLISHED


def is_pinned(pool: Pool, ino: InodeNo, *, policy_says: bool = True) -> bool:
    """Whether a pin keeps *ino*: its own, which wins, or that of a directory above it."""
    try:
        own = pool.index.xattr(ino, PIN)
    except Damaged:
        return True  # it may be pinned: fsck decides
    return policy_says if own is None else own == b"1"


def why_kept(pool: Pool, ino: InodeNo, policy: Policy) -> str | None:
    """Return what keeps *ino*, in a directory with *policy*; None if nothing does."""
    if policy.evict == "never":
        return "evict=never"
    # If nothing is pinned, this needs no lookup in the index.
    if ino in pool.pins or (policy.pin and is_pinned(pool, ino)):
        return "pinned"
    return None


def _may_be_kept(pool: Pool, ino: InodeNo, size_bytes: int) -> bool:
    """Whether *ino* fits below the limit of what is kept; what came first stays."""
    heat, bounds = pool.heat, pool.stay_bounds
    own_bytes = heat.held_as(ino, Rank.KEPT)
    others_bytes = heat.held_bytes[Rank.KEPT] - (own_bytes or 0)
    if own_bytes is None:
        if not size_bytes and empty_names_too_many(pool):
            return False
        end_bytes = bounds.kept_end_bytes(pool.leases.shares.held_bytes)
    else:
        end_bytes = bounds.kept_most_bytes
    return others_bytes + size_bytes <= end_bytes


def name_hash(record: InodeRecord) -> int:
    """Return 32 bits that recognise *record*'s name, in this run of kvfs and later ones."""
    return crc32c(record.name, record.parent & 0xFFFFFFFF)


def note(pool: Pool, ino: InodeNo, record: InodeRecord, *, used_s: int = -1) -> None:
    """Update *ino* in the heat; *used_s* as in ``Heat.note``."""
    if stat.S_ISREG(record.mode):
        policy = pool.policies.of(record.parent)
        rank = rank_of(record, policy.evict)
        if (
            rank is not Rank.NEVER
            and why_kept(pool, ino, policy)
            and _may_be_kept(pool, ino, record.allocated_bytes)
        ):
            rank = Rank.KEPT
        pool.heat.note(ino, record.allocated_bytes, rank, name_hash(record), used_s=used_s)


def keep(pool: Pool, ino: InodeNo, record: InodeRecord) -> None:
    """Keep block *ino* out of plans until something about it changes."""
    if ino in pool.heat:
        pool.heat.note(ino, record.allocated_bytes, Rank.NEVER, name_hash(record))
