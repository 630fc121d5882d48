"""What each tenant holds, and who gets no more: of the pool, and of what waits for room in it.

A draft, a block that somebody has open or mapped, an old version that is still read and one without
a name all keep their bytes, as leases, slabs and pins do. They count for the tenant that holds
them: the reader of another's block, or for a writer the directory above that is a tenant. What
others neither hold nor have stored up to their share may be held; beyond it a tenant would take
what others below their share have stored, or could store. Leases and pins have bounds of their own:
a tenant with little open is not refused for them.

Only a pool that is nearly full has a bound, since before that nobody loses anything by it.

One user's flood of waiting requests would use up what serves the others. So beyond a part of the
bound a tenant gets more only if it has less than an equal share of that part. One that has more is
refused, and nobody else is. The last of it is for root.
"""

from collections.abc import Callable
from typing import Final, NoReturn

from kvfs.core.account import ROOT, SPARE_SHARE, Accounts, Taken, TenantId
from kvfs.core.errors import NoSpace, OverShare, TooManyOpen
from kvfs.core.eviction_policy import Rank
from kvfs.core.lifecycle import HELD
from kvfs.core.sizes import format_size
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.engine.eviction.overrun_watch import OverrunWatch
from kvfs.machine.processes import OVERFLOW_UID
from kvfs.pool.rules.leases import Leases
from kvfs.pool.rules.policies import TenantRules
from kvfs.pool.space.space import SpaceFigures
from kvfs.storage.heat import Heat
from mount.files.handles import Handle, Handles

#: About what a look takes for each handle. So many times as long there is no other look; and for
#: a tenant that holds more than this part of what it may.
_LOOK_S: Final = 2e-6
_REST: Final = 64
_NEAR_REST: Final = 8
_NEAR: Final = 3 / 4
#: A pool with more than this share free is not full. Eviction frees less at a time, or who holds
#: too much would get what it has just freed.
_FULL_SHARE: Final = 1 / 4


class HeldShares:
    """How much each tenant holds, as counted last, and which tenants are over their share."""

    def __init__(
        self,
        accounts: Accounts,
        handles: Handles,
        leases: Leases,
        heat: Heat,
        rules: TenantRules,
        space: SpaceFigures,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._accounts: Final = accounts
        self._tenants: Final = accounts.tenants
        self._directories: Final = accounts.directories
        self._quotas_bytes: Final = accounts.entitlements.quotas_bytes
        self._lately: Final = accounts.lately
        self._handles: Final = handles
        self._leases: Final = leases
        self._heat: Final = heat
        self._rules: Final = rules
        self._space: Final = space
        self._monotonic_s: Final = monotonic_s
        #: When the last count began, and about how long it took.
        self._looked_s = self._took_s = 0.0
        #: Tenants that hold all that they may, or more; and those that nearly do.
        self._over: set[TenantId] = set()
        self._near: set[TenantId] = set()
        #: Tenants that keep their whole quota from eviction, without blocks that they only read.
        self._over_quota: set[TenantId] = set()
        #: What each tenant keeps by open files.
        self._by_files: Final = Taken(accounts.tenants)
        #: How often somebody was refused.
        self.refused = 0

    def require(self, uid: int, size_bytes: int = 0, *, reads: bool = False) -> None:
        """Raise OverShare if the tenant of *uid* holds its share, or would with *size_bytes* more.

        Raise TooManyOpen if it *reads*.
        """
        over = self._is_over(uid) or (size_bytes > 0 and self._would_be_over(uid, size_bytes))
        if not over and (reads or not self._quotas_bytes or not self._is_over_quota(uid)):
            self._accounts.kept_bytes += size_bytes
            return
        self._refuse(uid, reads=reads)

    def _refuse(self, uid: int, *, reads: bool = False) -> NoReturn:
        """Raise OverShare; TooManyOpen if the caller *reads*."""
        self.refused += 1
        who, held = self._accounts.name_of(self._tenants[uid]), self._accounts.held.by(uid)
        told = f"tenant {who} holds {format_size(held)}, more than its share"
        raise TooManyOpen(told) if reads else OverShare(told)

    def require_draft(self, directory: InodeNo, uid: int) -> int:
        """Raise OverShare if the tenant that a write counts for holds all that it may.

        Return that tenant: that of user *uid*, or a directory above *directory* that is one.
        """
        below = self._rules.below(directory) if self._directories else None
        holder = uid if below is None else below
        self.require(holder)
        return holder

    def directory_of(self, ino: InodeNo) -> InodeNo:
        """Return the directory of file *ino*; the root for one without a name."""
        record = self._rules.index.inode_or_miss(ino)
        return ROOT_INODE if record is None else record.parent

    def require_growth(self, handle: Handle, size_bytes: int = 0) -> None:
        """Raise OverShare if who holds *handle* may not keep *size_bytes* more from eviction.

        0 for a few: it is enough that somebody who has too much gets no more of them.
        """
        if handle.holder >= 0:
            self.require(self._holder(handle), size_bytes)

    def payer(self, handle: Handle) -> int:
        """Return who pays for what requests on *handle* hold; all that are unknown are one."""
        return OVERFLOW_UID if handle.holder < 0 else self._holder(handle)

    def _holder(self, handle: Handle) -> int:
        """Return the user, or the tenant, that keeps the bytes of *handle* from eviction."""
        opened = handle.opened
        if not opened.writers or not self._directories:
            return handle.holder
        record = opened.gone or self._rules.index.inode_or_miss(opened.ino)
        below = None if record is None else self._rules.below(record.parent)
        return handle.holder if below is None else below

    @property
    def _is_full(self) -> bool:
        return self._free_bytes <= 0

    def _is_over_quota(self, uid: int) -> bool:
        if (tenant := self._tenants[uid]) not in self._quotas_bytes:
            return False
        self._look_after(_NEAR_REST)
        return tenant in self._over_quota

    def _would_be_over(self, uid: int, size_bytes: int) -> bool:
        """Whether the tenant of *uid* would hold too much with *size_bytes* more."""
        if uid == ROOT or self._free_bytes > size_bytes:
            return False
        if size_bytes > self._space.usable_bytes:
            return False  # larger than the pool: refused for its size, not for anybody's share
        self._look_after(_NEAR_REST)
        left_bytes = self._left_bytes(self._tenants[uid])
        if left_bytes is None or left_bytes >= size_bytes:
            return False
        return self._by_files.by(uid) + size_bytes >= self._few_bytes

    def _left_bytes(self, tenant: TenantId) -> int | None:
        return self._accounts.left_bytes(tenant, self._space.usable_bytes)

    @property
    def _few_bytes(self) -> int:
        """How much each may have open whatever others hold: together they have a part spared."""
        return self._spare_bytes // max(1, len(self._by_files.rows()))

    @property
    def _spare_bytes(self) -> int:
        return int(self._space.usable_bytes * SPARE_SHARE)

    @property
    def _free_bytes(self) -> int:
        """How much may be taken before the pool counts as full."""
        return self._space.unclaimed_bytes - int(self._space.usable_bytes * _FULL_SHARE)

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
        """Stop drafts that took space without asking, of tenants that are over their share."""
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
        holder = self._holder(handle)
        if self._is_over(holder) or self._is_over_quota(holder):
            self.refused += watch.stop(opened)

    def count_anew(self) -> None:
        """Count anew who holds what."""
        self._looked_s = self._monotonic_s()
        accounts, tenants, leases = self._accounts, self._tenants, self._leases
        held, by_files, stays = accounts.held, self._by_files, Taken(tenants)
        held.begin_anew()
        by_files.begin_anew()
        accounts.drafts.begin_anew()
        for kept in (accounts.leased, accounts.slabs, accounts.pinned):
            for tenant, kept_bytes in kept.rows().items():
                held.count(tenant, kept_bytes)
                stays.count(tenant, kept_bytes)
        pinned_bytes = self._heat.held_bytes[Rank.KEPT]
        accounts.kept_bytes = accounts.leased.total + accounts.slabs.total + pinned_bytes
        accounts.kept_bytes += accounts.names.total
        holders = dict[InodeNo, set[TenantId]]()
        for handle in self._handles.held():
            opened, holder = handle.opened, self._holder(handle)
            if leases.state_of(opened.ino) in HELD:
                continue
            others = holders.setdefault(opened.ino, set())
            if not others and self._heat.held_as(opened.ino, Rank.KEPT) is None:
                accounts.kept_bytes += opened.allocated_bytes
            if (tenant := tenants[holder]) not in others:
                others.add(tenant)
                held.count(holder, opened.allocated_bytes)
                by_files.count(holder, opened.allocated_bytes)
                if opened.writers:
                    stays.count(holder, opened.allocated_bytes)
                    accounts.drafts.count(holder, opened.allocated_bytes)
        self._heat.lend(holders)
        self._lately.remember(self._looked_s)
        self._took_s = _LOOK_S * len(holders)
        few_bytes = self._few_bytes
        self._over, self._near = set(), set()
        self._over_quota = {
            tenant
            for tenant, quota_bytes in self._quotas_bytes.items()
            if stays.by(tenant) >= quota_bytes
        }
        for tenant, held_bytes in held.rows().items():
            left_bytes = self._left_bytes(tenant)
            if left_bytes is not None and held_bytes >= _NEAR * (held_bytes + left_bytes):
                self._near.add(tenant)
                if left_bytes <= 0 and by_files.by(tenant) >= few_bytes:
                    self._over.add(tenant)


#: Up to this part of the bound nobody is refused, and up to the second one no user but for its own.
_WAITS_FREELY: Final = 3 / 4
_WAITS_BUT_ROOT: Final = 7 / 8


class WaitShares:
    """What waiting requests hold in memory, by tenant."""

    def __init__(self, waiting: Taken, bound_bytes: Callable[[], int]) -> None:
        """Count in *waiting*; all together may hold *bound_bytes*."""
        self._waiting: Final = waiting
        self._bound_bytes: Final = bound_bytes
        #: Requests that were refused because too many waited already.
        self.turned_away = 0

    def begin(self, uid: int, size_bytes: int) -> None:
        """Count a waiter of the tenant of *uid*, which holds *size_bytes*.

        Raises OverShare if it has its share, NoSpace if all together have theirs.
        """
        waiting, bound_bytes = self._waiting, self._bound_bytes()
        together_bytes, own_bytes = waiting.total + size_bytes, waiting.by(uid) + size_bytes
        may_bytes = bound_bytes * (1 if uid == ROOT else _WAITS_BUT_ROOT)
        if together_bytes > may_bytes:
            self._refuse(NoSpace(f"others that wait for room hold {format_size(waiting.total)}"))
        tenants = len(waiting.rows()) + (own_bytes == size_bytes)
        freely_bytes = bound_bytes * _WAITS_FREELY
        if uid != ROOT and together_bytes > freely_bytes and own_bytes > freely_bytes / tenants:
            self._refuse(
                OverShare(f"its requests that wait for room hold {format_size(own_bytes)}")
            )
        waiting.count(uid, size_bytes)

    def end(self, uid: int, size_bytes: int) -> None:
        """Count one less."""
        self._waiting.count(uid, -size_bytes)

    def _refuse(self, error: NoSpace | OverShare) -> None:
        self.turned_away += 1
        raise error
