"""Which rank a block has among those that may go: its record and its directory's policy say so."""

import stat
from typing import Final

from kvfs.checksum import crc32c
from kvfs.eviction import Rank
from kvfs.lifecycle import TABLE, Goes, State
from kvfs.pool import Pool
from kvfs.types import InodeNo, InodeRecord

#: Smaller files are configurations and sidecars: next to no space, and much is lost with them.
SMALL_BYTES: Final = 64 << 10


def rank_of(record: InodeRecord, evict: str) -> Rank:
    """Return the rank of a block with *record* in a directory whose policy says *evict*."""
    goes = TABLE[State(record.state)].goes
    if goes is Goes.NEVER or evict == "never":
        return Rank.NEVER
    if goes is Goes.FIRST or evict == "first":
        return Rank.FIRST
    if goes is Goes.AFTER_LEASES:
        return Rank.SPENT
    return Rank.SMALL if record.size_bytes < SMALL_BYTES else Rank.PUBLISHED


def name_hash(record: InodeRecord) -> int:
    """Return 32 bits that tell *record*'s name again, in this run of kvfs and in later ones."""
    return crc32c(record.name, record.parent & 0xFFFFFFFF)


def note(pool: Pool, ino: InodeNo, record: InodeRecord, *, used_s: int = -1) -> None:
    """Tell the heat what file *ino* is now; *used_s* as in ``Heat.note``."""
    if stat.S_ISREG(record.mode):
        rank = rank_of(record, pool.policies.of(record.parent).evict)
        pool.heat.note(ino, record.allocated_bytes, rank, name_hash(record), used_s=used_s)
