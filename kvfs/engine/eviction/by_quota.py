"""Evicting what tenants store above their quota: their own coldest blocks, ahead of any need."""

import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.core.account import TenantId
from kvfs.core.changed import Reason
from kvfs.core.eviction_policy import Columns
from kvfs.core.fair_shares import Plan, plan_of_one
from kvfs.core.types import InodeNo
from kvfs.engine.eviction.reclaim import BATCH, CALL_MAX, Reclaim
from kvfs.engine.eviction.victims import Victims
from kvfs.pool.pool import Pool

#: So many blocks are named at a time.
_NAMED: Final = 512
#: A plan expires after this, because its blocks may have been used since.
_PLAN_AGE_S: Final = 1.0
#: After a plan that found nothing, no other one begins for this long.
_BARREN_S: Final = 1.0


class QuotaEviction:
    """Takes the tenants over their quota in turn, each until it is below it."""

    def __init__(self, pool: Pool, reclaim: Reclaim) -> None:
        self._pool = pool
        self._reclaim = reclaim
        #: Those that have, or had, more than their quota.
        self._of: dict[TenantId, Victims] = {}

    def run_due(self) -> None:
        """Evict some of what each tenant has above its quota: as much as fits into a turn."""
        accounts, left = self._pool.space.accounts, CALL_MAX
        for tenant, quota_bytes in accounts.entitlements.quotas_bytes.items():
            excess_bytes = accounts.stored.by(tenant) - quota_bytes
            if excess_bytes > 0 and (slot := self._pool.rules.heat.slot_of(tenant)) is not None:
                left -= self._evict_of(tenant, slot, excess_bytes, left)

    def _evict_of(self, tenant: TenantId, slot: int, excess_bytes: int, most: int) -> int:
        """Evict *excess_bytes* of one tenant, of *most* blocks; return how many were looked at."""
        victims = self._of.get(tenant)
        if victims is None:
            victims = Victims(self._pool, barren_s=_BARREN_S, age_s=_PLAN_AGE_S)
            self._of[tenant] = victims
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
                if ino in self._pool.rules.heat:
                    victims.refuse(ino)
        return looked_at

    def _next_batch(self, victims: Victims, size_bytes: int) -> list[InodeNo]:
        """Return the next victims, no more than hold *size_bytes*."""
        batch: list[InodeNo] = []
        while size_bytes > 0 and len(batch) < BATCH and (ino := victims.next()) is not None:
            batch.append(ino)
            size_bytes -= self._pool.rules.heat.allocated_bytes(ino)
        return batch

    def _choose(self, slot: int, columns: Columns, but_not: NDArray[np.uint64]) -> Plan:
        return plan_of_one(
            *(self._pool.rules.heat.policy, columns, slot),
            bytes_wanted=self._pool.space.taken.capacity_bytes,
            count_max=_NAMED,
            but_not=but_not,
        )
