"""The eviction rank of a block, from its record, its directory's policy and its pin; and the pins.

A pinned directory counts with the bytes that it held when it was pinned. A limit keeps a part of
the pool evictable, since a pool of pins alone is full. ``Pins`` checks it when a pin is set, and
``Ranks`` for each new block.
"""

import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvfs.core.account import Taken
from kvfs.core.changed import Changed, Reason, Why
from kvfs.core.checksum import crc32c
from kvfs.core.directory_policy import PIN, DirectoryPolicy
from kvfs.core.errors import Damaged, NotPermitted
from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import SETTLED, TABLE, Goes, State
from kvfs.core.sizes import format_size
from kvfs.core.types import SECOND_NS, InodeNo, InodeRecord
from kvfs.pool.rules.hints import Hints
from kvfs.pool.rules.leases import LeaseShares
from kvfs.pool.rules.policies import Policies, TenantRules
from kvfs.pool.space.space import StayBounds
from kvfs.storage.heat import Heat
from kvfs.storage.heat_columns import ALWAYS_S, Told
from kvfs.storage.index import Index

#: Smaller files are probably configurations or sidecars: evicting them frees little and costs much.
SMALL_BYTES: Final = 64 << 10
#: Changes that are no use of the block: one that is new to the heat was last used at its ctime.
_NO_USE: Final = frozenset({Why.FOUND, Why.RECONCILED, Why.ATTRIBUTED, Why.MOVED})
#: Names in one step of counting; after a start requests are handled between the steps.
_STEP: Final = 256
#: A directory with more names than this can be pinned only by the settings file, not by an
#: attribute: counting it here would keep every request waiting.
_COUNTED_MAX: Final = 100_000


def rank_of(record: InodeRecord, evict: str) -> Rank:
    """Return the rank of a block with *record* under policy *evict*, if no pin keeps it."""
    goes = TABLE[State(record.state)].goes
    if goes is Goes.NEVER:
        return Rank.NEVER
    if goes is Goes.FIRST or evict == "first":
        return Rank.FIRST
    if evict == "together":  # whatever its size and kind: a unit has one rank
        return Rank.PUBLISHED
    if goes is Goes.AFTER_LEASES:
        return Rank.ORPHAN_SLAB
    return Rank.SMALL if record.size_bytes < SMALL_BYTES else Rank.PUBLISHED


def name_hash(record: InodeRecord) -> int:
    """Return a 32-bit hash of *record*'s name and directory, the same in every run of kvfs."""
    return crc32c(record.name, record.parent & 0xFFFFFFFF)


class _Pin(NamedTuple):
    """A pinned inode: its owner, and what it held when it was pinned."""

    uid: int
    size_bytes: int


class Pins:
    """The pins of one pool, by inode."""

    follows: Final = frozenset(
        {Why.ATTRIBUTED, Why.REPLACED, Why.REMOVED, Why.LOST, Why.EVICTED, Why.RECONCILED}
    )

    def __init__(self, index: Index, pinned: Taken) -> None:
        """Count in *pinned* the allocated bytes under pins when they were set, by owner."""
        self._index = index
        self._taken = pinned
        self._pinned: dict[InodeNo, _Pin] = {}

    @property
    def pinned_bytes(self) -> int:
        """Allocated bytes under all pins when they were set; used only for the limit."""
        return self._taken.total

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._pinned

    def follow(self, changed: Changed) -> None:
        """Pin or unpin by the attribute. A pin moves with the name if another inode inherits that.

        If a power loss brought back a directory's pin, the scan counts what the directory holds.
        """
        ino, record = changed.ino, changed.after
        if record is None:
            if ino in self._pinned:
                if changed.heir:
                    self.move(ino, changed.heir)
                self.drop(ino)
        elif changed.gained.get(PIN) == b"1":
            is_file = not stat.S_ISDIR(record.mode)
            size_bytes = record.allocated_bytes if is_file else changed.pinned_bytes
            self.set(ino, record.uid, size_bytes)
        elif PIN in changed.lost:
            self.drop(ino)

    def held_bytes(self, ino: InodeNo) -> int | None:
        """Return the bytes that *ino* held when it was pinned; None if it is not pinned."""
        pin = self._pinned.get(ino)
        return None if pin is None else pin.size_bytes

    def rows(self) -> list[tuple[InodeNo, int]]:
        """Return the pinned inodes, with the bytes that each held when it was pinned."""
        return [(ino, pin.size_bytes) for ino, pin in self._pinned.items()]

    def count(self, ino: InodeNo, record: InodeRecord, kept_bytes: int, limit_bytes: int) -> int:
        """Return how many bytes a pin of *ino* would keep; all others keep *kept_bytes*.

        Raises NotPermitted if that exceeds *limit_bytes* and *ino* is not pinned already, or if it
        has too many names to count.
        """
        size_bytes, is_all = self._held(ino, record)
        if not is_all:
            raise NotPermitted(f"more than {_COUNTED_MAX:,} names to count")
        others_bytes = max(kept_bytes, self.pinned_bytes)
        if ino not in self._pinned and others_bytes + size_bytes > limit_bytes:
            raise NotPermitted(
                f"pins would hold {format_size(others_bytes + size_bytes)}, and the limit is "
                f"{format_size(limit_bytes)} (pin_share)"
            )
        return size_bytes

    def set(self, ino: InodeNo, uid: int, size_bytes: int) -> None:
        """Pin *ino* of user *uid*, which holds *size_bytes*."""
        self.drop(ino)
        self._taken.count(uid, size_bytes)
        self._pinned[ino] = _Pin(uid, size_bytes)

    def drop(self, ino: InodeNo) -> None:
        """Unpin *ino*, if it was pinned."""
        pin = self._pinned.pop(ino, None)
        if pin is not None:
            self._taken.count(pin.uid, -pin.size_bytes)

    def move(self, ino: InodeNo, fresh: InodeNo) -> None:
        """Move the pin of *ino*, if it has one, to *fresh*, with the same bytes."""
        pin = self._pinned.get(ino)
        if pin is not None:
            self.drop(ino)
            self.set(fresh, *pin)

    def learn(self, ino: InodeNo, record: InodeRecord) -> Iterator[None]:
        """Take over a pin from the index; it is in force at once.

        Its bytes are counted in steps, one for each item of the iterator.
        """
        self.set(ino, record.uid, 0)
        return self.recount(ino, record)

    def recount(self, ino: InodeNo, record: InodeRecord) -> Iterator[None]:
        """Count the bytes of *ino* again, a step for each item of the iterator."""
        if ino in self._pinned:
            self.set(ino, record.uid, 0)
        for held_bytes, _ in self._count(ino, record):
            if ino not in self._pinned:  # unpinned meanwhile
                return
            self.set(ino, record.uid, held_bytes)
            yield

    def _held(self, ino: InodeNo, record: InodeRecord) -> tuple[int, bool]:
        """Return the bytes below *ino*, and whether all were counted; False with too many names."""
        held = (0, True)
        for so_far in self._count(ino, record):
            held = so_far
        return held

    def _count(self, ino: InodeNo, record: InodeRecord) -> Iterator[tuple[int, bool]]:
        """Count in steps; yield the bytes so far, and False at the end if names were left out."""
        if not stat.S_ISDIR(record.mode):
            yield record.allocated_bytes, True
            return
        held_bytes = counted = 0
        waiting = [ino]
        while waiting:
            for children in self._index.below(waiting.pop(), _STEP):
                counted += len(children)
                if counted > _COUNTED_MAX:
                    yield held_bytes, False
                    return
                for child, _ in children:
                    child_record = self._index.inode_or_miss(child)
                    if child_record is None:
                        continue
                    held_bytes += child_record.allocated_bytes
                    if stat.S_ISDIR(child_record.mode):
                        waiting.append(child)
                yield held_bytes, True


class Ranks:
    """Gives each block its rank in the heat, and its tenant."""

    follows: Final = frozenset(Why) - {Why.CREATED, Why.DRAFTED}

    def __init__(
        self,
        index: Index,
        heat: Heat,
        policies: Policies,
        pins: Pins,
        hints: Hints,
        shares: LeaseShares,
        bounds: StayBounds,
        tenants: TenantRules,
        empty_names_too_many: Callable[[], int],
    ) -> None:
        self._index = index
        self._heat = heat
        self._policies = policies
        self._pins = pins
        self._hints = hints
        self._shares = shares
        self._bounds = bounds
        self._tenants = tenants
        self._empty_names_too_many = empty_names_too_many

    def follow(self, changed: Changed) -> None:
        """Give a block its new rank, or drop it."""
        ino, record, why = changed.ino, changed.after, changed.why
        if record is None:
            if why is Why.EVICTED:
                self._heat.evicted(ino, for_space=changed.reason is Reason.SPACE)
            else:
                self._inherit(ino, changed.heir)
                self._heat.drop(ino)
        elif why is Why.SET:
            before = changed.before
            if before is not None and before.uid != record.uid and ino in self._heat:
                self.enter(ino, record)  # it is another tenant's now
        elif why not in _NO_USE:
            before = changed.before
            if why is Why.RENAMED and before is not None and before.state in SETTLED:
                # Before it is entered: the rename that ends a store is no further use.
                self._heat.touch(ino)
            self.enter(ino, record)
        elif record.state in SETTLED:
            self.enter(ino, record, used_s=max(0, record.ctime_ns // SECOND_NS))

    def _inherit(self, ino: InodeNo, heir: InodeNo) -> None:
        """Let *heir*, if it is a block already, be as warm as *ino*, which has its bytes, too."""
        if heir and self._heat.inherit(ino, heir):
            record = self._index.inode_or_miss(heir)
            if record is not None:
                self.enter(heir, record)

    def enter(self, ino: InodeNo, record: InodeRecord, *, used_s: int = -1) -> None:
        """Update *ino* in the heat, if it is a block; *used_s* as in ``Heat.put``."""
        if stat.S_ISREG(record.mode):
            policy = self._policies.of(record.parent)
            rank = rank_of(record, policy.evict)
            if (
                rank is not Rank.NEVER
                and self.why_kept(ino, policy)
                and self._may_be_kept(ino, record.allocated_bytes)
            ):
                rank = Rank.KEPT
            self._heat.put(
                *(ino, record.allocated_bytes, rank, name_hash(record)),
                used_s=used_s,
                tenant=self._tenants.of(record, policy),
            )
            if (policy.hint is not None or self._heat.is_hinted) and not policy.unit:
                self._hints.bias(ino, rank, policy.hint)

    def tell(
        self,
        ino: InodeNo,
        record: InodeRecord,
        told: Told,
        *,
        priority: int = 0,
        until_s: int = ALWAYS_S,
    ) -> bool:
        """Let block *ino* go as a client *told*, until *until_s* (of the clock of ages).

        Return whether the block is known.
        """
        is_known = self._heat.tell(ino, told, priority=priority, until_s=until_s)
        if is_known:
            self.enter(ino, record)
        return is_known

    def keep(self, ino: InodeNo, record: InodeRecord) -> None:
        """Keep block *ino* out of eviction plans until something about it changes."""
        if ino in self._heat:
            size_bytes, tenant = record.allocated_bytes, self._tenants.of(record)
            self._heat.put(ino, size_bytes, Rank.NEVER, name_hash(record), tenant=tenant)

    def why_kept(self, ino: InodeNo, policy: DirectoryPolicy) -> str | None:
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
