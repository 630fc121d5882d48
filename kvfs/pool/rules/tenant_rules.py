"""Whose each block is, and what attributes say that tenants may store (kvfs/core/entitlements.py).

A block is its owner's, or that of the directory at the top of the mount that it lies below, if that
is a tenant. So it moves with a rename. What lies below a directory that becomes a tenant, or that
moves, is counted anew by a scan (start_scan.py).
"""

import contextlib
import stat
from collections.abc import Mapping
from typing import Final

from kvfs.core.account import (
    NO_ENTITLEMENT,
    Accounts,
    Entitlement,
    TenantId,
    directory_of_tenant,
    tenant_of_directory,
)
from kvfs.core.changed import Changed, Why
from kvfs.core.directory_policy import TENANT, DirectoryPolicy
from kvfs.core.entitlements import entitled_by, said_by, with_said
from kvfs.core.errors import Damaged, InvalidRequest
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord
from kvfs.pool.rules.policies import Policies
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index


class TenantRules:
    """Keeps the entitlements of a mount as the attributes say, and the directories among them."""

    follows: Final = frozenset(
        {Why.CREATED, Why.RENAMED, Why.ATTRIBUTED, Why.REPLACED, Why.REMOVED, Why.LOST}
        | {Why.RECONCILED}
    )

    def __init__(
        self,
        index: Index,
        accounts: Accounts,
        heat: Heat,
        policies: Policies,
        named: Mapping[bytes, Entitlement],
    ) -> None:
        """Learn what is said now; damage and what is no value say nothing.

        *named*: what the settings say of directories at the top of the mount. Those that only
        attributes make tenants are found by the scan after a start.
        """
        self.index: Final = index
        self._accounts = accounts
        self._heat = heat
        self._policies = policies
        self._named = named
        #: Whether blocks that no change told of are another tenant's now.
        self.outdated = False
        self._learn_all()

    def configure(
        self,
        users: Mapping[TenantId, Entitlement],
        named: Mapping[bytes, Entitlement],
        idle_s: float,
    ) -> None:
        """The settings say else now; what attributes say still goes over them.

        *users* and *idle_s*: as for ``Entitlements``.
        """
        entitlements, directories = self._accounts.entitlements, self._accounts.directories
        weighed, before = set(entitlements.named()), dict(directories)
        self._named = named
        self._policies.name_tenants(named)
        entitlements.begin_anew(users, idle_s)
        self._learn_all()
        for tenant in before:
            ino = directory_of_tenant(tenant)
            if (record := self.index.inode_or_miss(ino)) is not None:
                self.learn_directory(ino, record)
        for tenant in weighed.union(entitlements.named()):
            self._heat.weigh(tenant)
        self.outdated |= before.keys() != directories.keys()

    def _learn_all(self) -> None:
        """Learn what attributes of the root say, and the directories that the settings name."""
        for name, value in self._attributes(ROOT_INODE).items():
            self._learn(name, value)
        for name in self._named:
            ino = self.index.lookup(ROOT_INODE, name)
            record = None if ino is None else self.index.inode_or_miss(ino)
            if ino is not None and record is not None and stat.S_ISDIR(record.mode):
                self.learn_directory(ino, record)

    def of(self, record: InodeRecord, policy: DirectoryPolicy | None = None) -> TenantId:
        """Return whose the block with *record* is; *policy*: that of its directory, if at hand."""
        directory = (policy or self._policies.of(record.parent)).tenant
        return tenant_of_directory(directory) if directory else self._accounts.tenants[record.uid]

    def below(self, directory: InodeNo) -> TenantId | None:
        """Return the tenant that has all blocks in *directory*, None: each is its owner's."""
        top = self._policies.of(directory).tenant
        return tenant_of_directory(top) if top else None

    def follow(self, changed: Changed) -> None:
        """Learn what is said anew, or no more, and which directories come and go."""
        if changed.ino == ROOT_INODE:
            for name in changed.lost.keys() - changed.gained.keys():
                self._learn(name, None)
            for name, value in changed.gained.items():
                self._learn(name, value)
            return
        record = changed.after or changed.before
        if record is None or not stat.S_ISDIR(record.mode):
            return
        if changed.after is None:
            self._forget_directory(changed.ino)
        elif changed.why is Why.RENAMED and changed.before is not None:
            self._follow_move(changed.ino, changed.before, changed.after)
        elif record.parent == ROOT_INODE:
            self.outdated |= TENANT in changed.lost.keys() | changed.gained.keys()
            self.learn_directory(changed.ino, record)

    def _follow_move(self, ino: InodeNo, before: InodeRecord, after: InodeRecord) -> None:
        """Directory *ino* has another name, and perhaps all below it is another tenant's."""
        own = tenant_of_directory(ino)
        was = own if own in self._accounts.directories else None
        if before.parent != ROOT_INODE:
            was = self.below(before.parent)
        self.learn_directory(ino, after)
        self.outdated |= was != self.below(ino)

    def learn_directory(self, ino: InodeNo, record: InodeRecord) -> None:
        """Learn whether *ino* is a tenant now, and what it may store then."""
        tenant, entitlements = tenant_of_directory(ino), self._accounts.entitlements
        if self._policies.of(ino).tenant != ino:
            self._forget_directory(ino)
            return
        path = f"/{record.name.decode(errors='backslashreplace')}"
        self._accounts.directories[tenant] = path
        configured = self._named.get(record.name, NO_ENTITLEMENT)
        entitlements.configure(tenant, configured)
        entitlements.entitle(tenant, entitled_by(configured, self._attributes(ino)))
        self._heat.weigh(tenant)

    def _forget_directory(self, ino: InodeNo) -> None:
        tenant = tenant_of_directory(ino)
        if self._accounts.directories.pop(tenant, None) is not None:
            self._accounts.entitlements.forget(tenant)
            self._heat.weigh(tenant)

    def _attributes(self, ino: InodeNo) -> dict[bytes, bytes]:
        """Return the attributes of *ino* that can be read."""
        found: dict[bytes, bytes] = {}
        for name in self.index.xattrs(ino):
            with contextlib.suppress(Damaged):
                if (value := self.index.xattr(ino, name)) is not None:
                    found[name] = value
        return found

    def _learn(self, name: bytes, value: bytes | None) -> None:
        said = said_by(name)
        if said is None or said.uid is None:
            return
        entitlements, tenant = self._accounts.entitlements, self._accounts.tenants[said.uid]
        before, configured = entitlements.of(tenant), entitlements.configured(tenant)
        with contextlib.suppress(InvalidRequest):
            entitlements.entitle(tenant, with_said(before, configured, said.key, value))
            self._heat.weigh(tenant)
