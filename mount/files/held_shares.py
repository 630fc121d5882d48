"""How much of the pool each tenant keeps from eviction, and who gets no more of it.

A draft, a block that somebody has open or mapped, an old version that is still read and one without
a name all keep their bytes, as leases, slabs and pins do. They count for who holds them: a reader
of another's block holds it on its own account. Up to a share, what others do not store may
be held; beyond it a tenant would take what others below their share have stored, or could store.
Leases and pins have bounds of their own: nobody is refused for them who has little open.

Only a pool that is nearly full has a bound, since before that nobody loses anything by it.
"""

from collections.abc import Callable
from typing import Final

from kvfs.core.account import ROOT, Accounts, StoredLately, Taken, TenantId
from kvfs.core.errors import OverShare, TooManyOpen
from kvfs.core.lifecycle import HELD
from kvfs.engine.eviction.overrun_watch import OverrunWatch
from kvfs.pool.rules.leases import Leases
from kvfs.pool.space.whole_space import SpaceFigures
from mount.files.handles import Handle, Handles

#: About what a look takes for each handle. So many times as long there is no other look; and for
#: a tenant that holds more than this part of what it may.
_LOOK_S: Final = 1e-6
_REST: Final = 64
_NEAR_REST: Final = 8
_NEAR: Final = 3 / 4
#: A pool that has more free than this share is not full: eviction keeps less free (headroom.py).
_FULL_SHARE: Final = 1 / 16


class HeldShares:
    """Who holds how much, as found at the last look, and who is over its share."""

    def __init__(
        self,
        accounts: Accounts,
        handles: Handles,
        leases: Leases,
        space: SpaceFigures,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._accounts: Final = accounts
        self._tenants: Final = accounts.tenants
        self._quotas_bytes: Final = accounts.entitlements.quotas_bytes
        self._lately: Final = StoredLately(accounts.stored)
        self._handles: Final = handles
        self._leases: Final = leases
        self._space: Final = space
        self._monotonic_s: Final = monotonic_s
        #: When the last look began, and about how long it took.
        self._looked_s = self._took_s = 0.0
        #: Who holds what it may, or more; and who nearly does.
        self._over: set[TenantId] = set()
        self._near: set[TenantId] = set()
        #: Who keeps as much from eviction as its quota, without what it only reads.
        self._over_quota: set[TenantId] = set()
        #: How often somebody was refused.
        self.refused = 0

    def require(self, uid: int, *, reads: bool = False) -> None:
        """Raise OverShare if the tenant of *uid* holds its share; TooManyOpen if it *reads*."""
        if not self._is_over(uid) and (reads or not self._is_over_quota(uid)):
            return
        self.refused += 1
        told = f"uid {uid} holds {self._accounts.held.by(uid)} bytes, more than its share"
        raise TooManyOpen(told) if reads else OverShare(told)

    def require_growth(self, handle: Handle) -> None:
        """Raise OverShare if who holds *handle* may keep nothing more from eviction."""
        if handle.holder >= 0:
            self.require(handle.holder)

    @property
    def _is_full(self) -> bool:
        space = self._space
        return space.unclaimed_bytes <= space.usable_bytes * _FULL_SHARE

    def _is_over_quota(self, uid: int) -> bool:
        if not self._quotas_bytes or (tenant := self._tenants[uid]) not in self._quotas_bytes:
            return False
        self._look_after(_NEAR_REST)
        return tenant in self._over_quota

    def _is_over(self, uid: int) -> bool:
        if uid == ROOT or not self._is_full:
            return False
        tenant = self._tenants[uid]
        self._look_after(_NEAR_REST if tenant in self._near else _REST)
        return tenant in self._over

    def _look_after(self, rest: int) -> None:
        if self._monotonic_s() >= self._looked_s + rest * self._took_s:
            self.count_anew()

    def run_due(self, watch: OverrunWatch) -> None:
        """Stop the drafts of who is over its share that took space without asking."""
        if not self._is_full and not self._quotas_bytes:
            return
        self._look_after(_REST)
        if self._near or self._over_quota:
            for handle in list(self._handles.held()):
                self.stop_growth(handle, watch)

    def stop_growth(self, handle: Handle, watch: OverrunWatch) -> None:
        """Stop the draft of *handle* if it grew on passthrough and its holder is over its share."""
        opened = handle.opened
        if opened.taken_unasked <= 0 or not opened.writers:
            return
        if self._is_over(handle.holder) or self._is_over_quota(handle.holder):
            self.refused += watch.stop(opened)

    def count_anew(self) -> None:
        """Count anew who holds what."""
        self._looked_s = self._monotonic_s()
        accounts, tenants, leases = self._accounts, self._tenants, self._leases
        held, by_files, stays = accounts.held, Taken(tenants), Taken(tenants)
        held.begin_anew()
        for kept in (accounts.leased, accounts.slabs, accounts.pinned):
            for tenant, kept_bytes in kept.rows().items():
                held.count(tenant, kept_bytes)
                stays.count(tenant, kept_bytes)
        seen = set[tuple[int, int]]()
        for handle in self._handles.held():
            opened = handle.opened
            key = (tenants[handle.holder], opened.ino)
            if key not in seen and leases.state_of(opened.ino) not in HELD:
                seen.add(key)
                held.count(handle.holder, opened.allocated_bytes)
                by_files.count(handle.holder, opened.allocated_bytes)
                if opened.writers:
                    stays.count(handle.holder, opened.allocated_bytes)
        self._lately.remember(self._looked_s)
        self._took_s = _LOOK_S * len(seen)
        whole_bytes = self._space.usable_bytes
        spare_bytes = int(whole_bytes * _FULL_SHARE)
        self._over, self._near = set(), set()
        self._over_quota = {
            tenant
            for tenant, quota_bytes in self._quotas_bytes.items()
            if stays.by(tenant) >= quota_bytes
        }
        for tenant, held_bytes in held.rows().items():
            bound_bytes = self._lately.bound_bytes(tenant, whole_bytes, spare_bytes)
            if bound_bytes is not None and held_bytes >= _NEAR * bound_bytes:
                self._near.add(tenant)
                if held_bytes >= bound_bytes and by_files.by(tenant) >= spare_bytes:
                    self._over.add(tenant)
