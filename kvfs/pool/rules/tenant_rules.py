"""What attributes of the root directory say that tenants may store (kvfs/core/entitlements.py)."""

import contextlib
from typing import Final

from kvfs.core.account import Accounts
from kvfs.core.changed import Changed, Why
from kvfs.core.entitlements import said_by, with_said
from kvfs.core.errors import Damaged, InvalidRequest
from kvfs.core.types import ROOT_INODE
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index


class TenantRules:
    """Keeps the entitlements of a mount as the attributes say."""

    follows: Final = frozenset({Why.ATTRIBUTED, Why.RECONCILED})

    def __init__(self, index: Index, accounts: Accounts, heat: Heat) -> None:
        """Learn what is said now; damage and what is no value say nothing."""
        self._accounts = accounts
        self._heat = heat
        for name in index.xattrs(ROOT_INODE):
            with contextlib.suppress(Damaged):
                self._learn(name, index.xattr(ROOT_INODE, name))

    def follow(self, changed: Changed) -> None:
        """Learn what is said anew, or no more."""
        if changed.ino == ROOT_INODE:
            for name in changed.lost.keys() - changed.gained.keys():
                self._learn(name, None)
            for name, value in changed.gained.items():
                self._learn(name, value)

    def _learn(self, name: bytes, value: bytes | None) -> None:
        said = said_by(name)
        if said is None:
            return
        entitlements, tenant = self._accounts.entitlements, self._accounts.tenants[said.uid]
        before, configured = entitlements.of(tenant), entitlements.configured(tenant)
        with contextlib.suppress(InvalidRequest):
            entitlements.entitle(tenant, with_said(before, configured, said.key, value))
            self._heat.weigh(tenant)
