"""The eviction rank of a block, from its record, its directory's policy and its pin."""

import stat
from collections.abc import Callable
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.checksum import crc32c
from kvfs.core.directory_policy import PIN, Policy
from kvfs.core.errors import Damaged
from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import SETTLED, TABLE, Goes, State
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.pool.lease_shares import LeaseShares
from kvfs.pool.pins import Pins
from kvfs.pool.policies import Policies
from kvfs.pool.space import StayBounds
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index

#: Smaller files are probably configurations or sidecars: evicting them frees little and costs much.
SMALL_BYTES: Final = 64 << 10
#: Changes that are no use of the block: one that is new to the heat was last used at its ctime.
_NO_USE: Final = frozenset({Why.FOUND, Why.RECONCILED, Why.ATTRIBUTED})


def rank_of(record: InodeRecord, evict: str) -> Rank:
    """Return the rank of a block with *record* under policy *evict*, if no pin keeps it."""
    goes = TABLE[State(record.state)].goes
    if goes is Goes.NEVER:
        return Rank.NEVER
    if goes is Goes.FIRST or evict == "first":
        return Rank.FIRST
    if goes is Goes.AFTER_LEASES:
        return Rank.ORPHAN_SLAB
    return Rank.SMALL if record.size_bytes < SMALL_BYTES else Rank.PUBLISHED


def name_hash(record: InodeRecord) -> int:
    """Return a 32-bit hash of *record*'s name and directory, the same in every run of kvfs."""
    return crc32c(record.name, record.parent & 0xFFFFFFFF)


class Ranks:
    """Gives each block its rank in the heat."""

    follows: Final = frozenset(Why) - {Why.CREATED, Why.SET}

    def __init__(
        self,
        index: Index,
        heat: Heat,
        policies: Policies,
        pins: Pins,
        shares: LeaseShares,
        bounds: StayBounds,
        empty_names_too_many: Callable[[], int],
    ) -> None:
        self._index = index
        self._heat = heat
        self._policies = policies
        self._pins = pins
        self._shares = shares
        self._bounds = bounds
        self._empty_names_too_many = empty_names_too_many

    def follow(self, changed: Changed) -> None:
        """Give a block its new rank, or drop it."""
        ino, record, why = changed.ino, changed.after, changed.why
        if record is None:
            if why is Why.EVICTED:
                self._heat.evicted(ino)
            else:
                self._heat.drop(ino)
        elif why not in _NO_USE:
            self.enter(ino, record)
            before = changed.before
            if why is Why.RENAMED and before is not None and before.state in SETTLED:
                self._heat.touch(ino)  # for a draft, the store itself counts as the use
        elif record.state in SETTLED:
            self.enter(ino, record, used_s=max(0, record.ctime_ns // SECOND_NS))

    def enter(self, ino: InodeNo, record: InodeRecord, *, used_s: int = -1) -> None:
        """Update *ino* in the heat, if it is a block; *used_s* as in ``Heat.note``."""
        if stat.S_ISREG(record.mode):
            policy = self._policies.of(record.parent)
            rank = rank_of(record, policy.evict)
            if (
                rank is not Rank.NEVER
                and self.why_kept(ino, policy)
                and self._may_be_kept(ino, record.allocated_bytes)
            ):
                rank = Rank.KEPT
            self._heat.note(ino, record.allocated_bytes, rank, name_hash(record), used_s=used_s)

    def keep(self, ino: InodeNo, record: InodeRecord) -> None:
        """Keep block *ino* out of eviction plans until something about it changes."""
        if ino in self._heat:
            self._heat.note(ino, record.allocated_bytes, Rank.NEVER, name_hash(record))

    def why_kept(self, ino: InodeNo, policy: Policy) -> str | None:
        """Return what keeps *ino*, in a directory with *policy*, from eviction; None: nothing."""
        if policy.evict == "never":
            return "evict=never"
        # If nothing is pinned, this needs no lookup in the index.
        if ino in self._pins or (policy.pin and self._is_pinned(ino)):
            return "pinned"
        return None

    def _is_pinned(self, ino: InodeNo) -> bool:
        """Whether *ino*, in a pinned directory, is pinned: its own attribute wins."""
        try:
            own = self._index.xattr(ino, PIN)
        except Damaged:
            return True  # it may be pinned: fsck decides
        return own is None or own == b"1"

    def _may_be_kept(self, ino: InodeNo, size_bytes: int) -> bool:
        """Whether *ino* fits into the limit of what is kept; blocks kept before stay kept."""
        heat, bounds = self._heat, self._bounds
        own_bytes = heat.held_as(ino, Rank.KEPT)
        others_bytes = heat.held_bytes[Rank.KEPT] - (own_bytes or 0)
        if own_bytes is None:
            if not size_bytes and self._empty_names_too_many():
                return False
            end_bytes = bounds.kept_end_bytes(self._shares.held_bytes)
        else:
            end_bytes = bounds.kept_most_bytes
        return others_bytes + size_bytes <= end_bytes
