"""Evicting blocks for another reason than space: limits of names, of age (``ttl``), of tenants.

``Reclaim`` counts bytes. Where the index has too many names, it would evict a few large blocks
where many small ones have the names, and never an empty one. So there names are counted. Of what
tenants store above their quota their own coldest blocks go, ahead of any need.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.core.account import TenantId
from kvfs.core.changed import Reason
from kvfs.core.errors import NoSpace
from kvfs.core.eviction_policy import EVICTABLE, Columns, Lru, Rank
from kvfs.core.fair_shares import InOrder, Plan, plan_of_one
from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.engine.eviction.reclaim import BATCH, CALL_MAX, Reclaim
from kvfs.engine.eviction.units import UsesOfUnits
from kvfs.engine.eviction.victims import Victims
from kvfs.pool.allocator import Allocator
from kvfs.pool.pool import Pool
from kvfs.pool.pool_parts import RuleParts, SpaceParts
from kvfs.storage.age_clock import AgeClock
from kvfs.storage.background import Background
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index

_log: Final = logging.getLogger(__name__)

#: A plan from a long scan has at least 1/64 of all blocks. A scan of a hundred million rows takes
#: some seconds, and its plan should last longer than that.
_PLAN_PART: Final = 64
_PLAN_MAX: Final = 1 << 16
#: After a plan that found nothing, no other one begins for this long.
_BARREN_S: Final = 1.0

#: Returns up to so many blocks in the order of eviction, but none of those in the array.
_Coldest = Callable[[Columns, int, NDArray[np.uint64]], NDArray[np.uint64]]
#: Rows of the heat read in one tick (some 50 us), blocks looked at (some 6 us each), and evicted
#: (some 35 us each).
_ROWS: Final = 8192
_CANDIDATES: Final = 256
_EVICTED: Final = 2 * BATCH
#: The pause from one pass to the next: a part of the shortest ttl, within bounds.
_PAUSE_PART: Final = 1 / 16
_PAUSE_LEAST_S: Final = 0.25
_PAUSE_MOST_S: Final = 60.0
_RANKS: Final = tuple(int(rank) for rank in EVICTABLE)
#: The rank that counts when blocks are evicted for their names, by the usual rank.
_RANK_BY_NAME: Final = np.array(
    [Rank.PUBLISHED if rank is Rank.SMALL else rank for rank in Rank], np.uint8
)


def _coldest_names(columns: Columns, count: int, but_not: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return *count* inode numbers in the order of eviction, when names run out, not bytes.

    Each block counts as one, even if it holds no space. Small blocks are not spared, because they
    may have nearly all names. None of *but_not*. Takes milliseconds: call it in a thread.
    """
    each_one = columns._replace(
        rank=_RANK_BY_NAME[columns.rank],
        allocated_bytes=np.broadcast_to(np.uint64(1), columns.ino.shape),
    )
    return Lru().victims(each_one, bytes_wanted=count, count_max=count, but_not=but_not)


def _coldest_empty(columns: Columns, count: int, but_not: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return *count* inode numbers of blocks that hold no space, as ``_coldest_names`` does."""
    empty = columns.allocated_bytes == 0
    return _coldest_names(columns._replace(ino=columns.ino * empty), count, but_not)


class IndexGrowth:
    """Preallocates space for the index, and has blocks evicted if the device has none for it."""

    def __init__(self, index: Index, background: Background, allocator: Allocator) -> None:
        self._index = index
        self._background = background
        self._allocator = allocator
        #: Whether the device had no space for it.
        self._starves = False

    def run_due(self) -> None:
        """Have the index grow, in a thread, if that is due."""
        if self._index.preallocation_due():
            self._background.submit_long(self._grow)
        if self._starves:
            self._starves = False
            self._allocator.make_index_room()

    def _grow(self) -> None:
        try:
            self._index.preallocate()
        except NoSpace as error:
            _log.info("%s; evicting blocks for it", error)
            self._starves = not self._index.room.is_bound


class NameEviction:
    """Evicts as many names as the index's map or the device has too many, and no more."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool = pool
        self._of_all = self._turns(reclaim, _coldest_names)
        #: Evicts empty files, if the device has less space than the capacity.
        self._of_empty = self._turns(reclaim, _coldest_empty)

    def _turns(self, reclaim: Reclaim, coldest: _Coldest) -> "_Turns":
        pool, heat = self._pool, self._pool.rules.heat
        victims = Victims(heat, pool.background, pool.monotonic_s, barren_s=_BARREN_S)
        return _Turns(heat, victims, reclaim, coldest)

    def run_due(self) -> None:
        """Evict as many blocks as there are names too many, in turns of milliseconds."""
        self._of_all.evict_some(self._excess())
        self._of_empty.evict_some(self._pool.empty_names_too_many())

    def make_room(self) -> None:
        """Evict names at once, because the index would refuse the next one."""
        self.run_due()
        self._pool.index.room.measure()

    def _excess(self) -> int:
        counters = self._pool.counters
        nodes = counters.directories + counters.symlinks + counters.others
        return self._pool.index.room.excess_names(counters.blocks + nodes)


class _Turns:
    """Evicts the blocks that one rule chooses, a turn at a time."""

    def __init__(self, heat: Heat, victims: Victims, reclaim: Reclaim, coldest: _Coldest) -> None:
        self._heat = heat
        self._victims = victims
        self._reclaim = reclaim
        self._coldest = coldest

    def evict_some(self, excess: int) -> None:
        """Evict some of *excess* blocks: as many as fit into one turn."""
        looked_at = 0
        while looked_at < min(excess, CALL_MAX):
            batch = self._next_batch(min(BATCH, excess - looked_at))
            if not batch and not self._replan(excess):
                return
            self._let_go(batch)
            looked_at += len(batch)

    def _next_batch(self, size: int) -> list[InodeNo]:
        named = (self._victims.next() for _ in range(size))
        return [ino for ino in named if ino is not None]

    def _let_go(self, batch: list[InodeNo]) -> None:
        self._reclaim.evict_these(batch, open_too=False, reason=Reason.NAMES)
        for ino in batch:
            if ino in self._heat:
                self._victims.refuse(ino)

    def _replan(self, count: int) -> bool:
        if self._victims.takes_long:
            count = max(count, len(self._heat) // _PLAN_PART)
        count = min(count, _PLAN_MAX)

        def choose(columns: Columns, but_not: NDArray[np.uint64]) -> Plan:
            return InOrder(self._coldest(columns, count, but_not).tolist())

        return self._victims.replan(choose)


class Expiry:
    """Evicts blocks that were unused for longer than their directory's policy ``ttl``.

    Each tick reads a part of the heat. A row that is old enough for the shortest ttl is looked at
    again, with the policy of its directory. So a tick takes a few milliseconds, whatever the pool
    holds. A block stays while it is unknown whether it was used within its ttl.
    """

    def __init__(
        self,
        index: Index,
        rules: RuleParts,
        age_clock: AgeClock,
        clock_ns: Callable[[], int],
        reclaim: Reclaim,
    ) -> None:
        self._index = index
        self._policies = rules.policies
        self._heat = rules.heat
        self._age_clock = age_clock
        self._clock_ns = clock_ns
        self._reclaim = reclaim
        #: The row at which the next tick goes on, and when the next pass begins.
        self._row = 0
        self._due_s = -math.inf
        #: The shortest ttl when the next pass was put off; if it changes, the pass does not wait.
        self._paused_for_s: float | None = None

    def run_due(self, now_s: float) -> None:
        """Go on with the present pass, or begin one that is due."""
        ttl_s = self._policies.shortest_ttl_s
        if ttl_s is None or (now_s < self._due_s and ttl_s == self._paused_for_s):
            return
        now_ns = self._age_clock.now_ns()
        stamp = self._heat.stamp_at(now_ns - int(ttl_s * SECOND_NS))
        if stamp is not None and self._go_on(stamp, now_ns):
            return
        self._row = 0
        self._paused_for_s = ttl_s
        self._due_s = now_s + min(max(_PAUSE_PART * ttl_s, _PAUSE_LEAST_S), _PAUSE_MOST_S)

    def _go_on(self, stamp: int, now_ns: int) -> bool:
        """Look at some rows that were touched before *stamp*; return whether some are left."""
        columns = self._heat.columns()
        rows = slice(self._row, self._row + _ROWS)
        is_old = (columns.ino[rows] != 0) & (columns.touched[rows] < stamp)
        found = np.flatnonzero(is_old & np.isin(columns.rank[rows], _RANKS)).tolist()
        expired: list[InodeNo] = []
        uses: dict[float, UsesOfUnits] = {}  # by ttl
        for count, at in enumerate(found):
            if count == _CANDIDATES or len(expired) == _EVICTED:
                self._row += at
                break
            ino = InodeNo(int(columns.ino[self._row + at]))
            if self._is_expired(ino, now_ns, uses):
                expired.append(ino)
        else:
            self._row += _ROWS
        for start in range(0, len(expired), BATCH):
            batch = expired[start : start + BATCH]
            self._reclaim.evict_these(batch, open_too=False, reason=Reason.TTL)
        return self._row < len(columns.ino)

    def _is_expired(self, ino: InodeNo, now_ns: int, uses: dict[float, UsesOfUnits]) -> bool:
        record = self._index.inode_or_miss(ino)
        if record is None:
            return False
        ttl_s = self._policies.of(record.parent).ttl_s
        if ttl_s is None:
            return False
        if ttl_s not in uses:
            since_ns = now_ns - int(ttl_s * SECOND_NS)
            uses[ttl_s] = UsesOfUnits(
                *(self._heat, self._age_clock, self._clock_ns), self._reclaim.units, since_ns
            )
        return uses[ttl_s].of(ino, record) is False


#: So many blocks are named at a time.
_NAMED: Final = 512
#: A plan expires after this, because its blocks may have been used since.
_PLAN_AGE_S: Final = 1.0


class QuotaEviction:
    """Takes the tenants over their quota in turn, each until it is below it."""

    def __init__(
        self,
        space: SpaceParts,
        heat: Heat,
        background: Background,
        monotonic_s: Callable[[], float],
        reclaim: Reclaim,
    ) -> None:
        self._space = space
        self._heat = heat
        self._begin_victims = functools.partial(
            Victims, heat, background, monotonic_s, barren_s=_BARREN_S, age_s=_PLAN_AGE_S
        )
        self._reclaim = reclaim
        #: Those that have, or had, more than their quota.
        self._of: dict[TenantId, Victims] = {}

    def run_due(self) -> None:
        """Evict some of what each tenant has above its quota: as much as fits into a turn."""
        accounts, left = self._space.accounts, CALL_MAX
        for tenant, quota_bytes in accounts.entitlements.quotas_bytes.items():
            excess_bytes = accounts.stored.by(tenant) - quota_bytes
            if excess_bytes > 0 and (slot := self._heat.slot_of(tenant)) is not None:
                left -= self._evict_of(tenant, slot, excess_bytes, left)

    def _evict_of(self, tenant: TenantId, slot: int, excess_bytes: int, most: int) -> int:
        """Evict *excess_bytes* of one tenant, of *most* blocks; return how many were looked at."""
        victims = self._of.get(tenant)
        if victims is None:
            victims = self._of[tenant] = self._begin_victims()
        looked_at = 0
        while excess_bytes > 0 and looked_at < most:
            victims.begin_batch()
            batch = self._next_batch(victims, excess_bytes)
            if not batch and not victims.replan(functools.partial(self._choose, slot)):
                break
            _, gone_bytes = self._reclaim.evict_these(batch, open_too=False, reason=Reason.QUOTA)
            excess_bytes -= gone_bytes
            looked_at += len(batch)
            for ino in batch:
                if ino in self._heat:
                    victims.refuse(ino)
        return looked_at

    def _next_batch(self, victims: Victims, size_bytes: int) -> list[InodeNo]:
        """Return the next victims, no more than hold *size_bytes*."""
        batch: list[InodeNo] = []
        while size_bytes > 0 and len(batch) < BATCH and (ino := victims.next()) is not None:
            batch.append(ino)
            size_bytes -= self._heat.allocated_bytes(ino)
        return batch

    def _choose(self, slot: int, columns: Columns, but_not: NDArray[np.uint64]) -> Plan:
        return plan_of_one(
            *(self._heat.policy, columns, slot),
            bytes_wanted=self._space.taken.capacity_bytes,
            count_max=_NAMED,
            but_not=but_not,
        )
