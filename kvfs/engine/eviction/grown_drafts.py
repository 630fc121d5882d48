"""What tenants hold in drafts that grow without asking, and how much more each may take.

A draft stores nothing yet, so eviction for it would take from others alone, whatever they have.
Hence the space kept free for what such drafts may take next, and what they take, ends where their
tenant may keep no more from eviction (``Accounts.left_bytes``).
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvfs.core.account import ROOT, SPARE_SHARE, TenantId
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool


class GrownDrafts:
    """The drafts of one moment that have grown, or may grow, without asking."""

    def __init__(self, pool: Pool, written: Iterable[OpenInode]) -> None:
        """Sum up what of *written* each tenant holds."""
        self._pool: Final = pool
        self._growing: Final = [
            each for each in written if each.taken_unasked > 0 or each.unreserved
        ]
        self._held: Final = Counter[TenantId]()
        self._tenant_of: Final[dict[OpenInode, TenantId]] = {}
        pool.space.accounts.lately.remember(pool.monotonic_s())
        for opened in self._growing:
            record = opened.gone or pool.index.inode_or_miss(opened.ino)
            if record is not None:
                self._tenant_of[opened] = tenant = pool.rules.tenants.of(record)
                self._held[tenant] += opened.allocated_bytes

    def may_take_bytes(self, opened: OpenInode, wanted_bytes: int) -> int:
        """Return how many of *wanted_bytes* may be kept free for *opened*, and count them."""
        tenant = self._tenant_of.get(opened)
        bound_bytes = None if tenant is None else self._bound_bytes(tenant)
        if tenant is None or bound_bytes is None:
            return wanted_bytes
        may_bytes = min(wanted_bytes, max(0, bound_bytes - self._held[tenant]))
        self._held[tenant] += may_bytes
        return may_bytes

    def to_stop(self) -> list[OpenInode]:
        """Return drafts, those that took most first, of tenants that hold more than they may.

        All others of a tenant go on, if it holds no more then. Root has no bound.
        """
        stopped: list[OpenInode] = []
        least_bytes = int(self._pool.space.taken.usable_bytes * SPARE_SHARE)
        left = self._held.copy()
        for opened in sorted(self._growing, key=lambda each: each.taken_unasked, reverse=True):
            tenant = self._tenant_of.get(opened)
            if tenant is None or tenant == ROOT or not opened.taken_unasked:
                continue
            bound_bytes = self._bound_bytes(tenant)
            if bound_bytes is not None and left[tenant] > max(bound_bytes, least_bytes):
                left[tenant] -= opened.allocated_bytes
                stopped.append(opened)
        return stopped

    def _bound_bytes(self, tenant: TenantId) -> int | None:
        """Return how much *tenant* may keep in drafts; None: there is no bound."""
        accounts = self._pool.space.accounts
        left_bytes = accounts.left_bytes(tenant, self._pool.space.taken.usable_bytes)
        return None if left_bytes is None else left_bytes + accounts.drafts.by(tenant)
