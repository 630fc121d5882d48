"""Policies of directories: who sees drafts, what is published, leased, pinned, evicted and when.

And whose the blocks below them are, with what attributes say that tenants may store.

Each is an extended attribute of a directory, or a line of the settings file. It holds for
everything below, unless a deeper directory sets it again. getxattr(2) returns the attributes, but
listxattr(2) does not list them, so that ``cp -a`` and ``rsync -X`` do not copy them elsewhere. The
directories that set ``evict=together``, the units of a pool, are listed for what is told of them.
"""

import contextlib
import stat
from collections.abc import Container, Mapping
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
from kvfs.core.directory_policy import (
    DRAFTS,
    EVICT,
    HINT,
    LEASE,
    NAMES,
    PIN,
    PREFIX,
    PUBLISH,
    TENANT,
    TTL,
    VALUES,
    DirectoryPolicy,
    ttl_of,
)
from kvfs.core.entitlements import IS_TENANT, entitled_by, said_by, with_said
from kvfs.core.errors import Damaged, InvalidRequest
from kvfs.core.hints import NO_HINT, hint_of
from kvfs.core.inode_rules import Ascent
from kvfs.core.types import NO_INODE, PATH_MAX_BYTES, ROOT_INODE, InodeNo, InodeRecord
from kvfs.pool.rules.paths import path_of
from kvfs.storage.heat import Heat
from kvfs.storage.index import Index

#: Directories whose policy is cached; others are looked up again.
_CACHED_MAX: Final = 4096
TOGETHER: Final = b"together"


class Policies:
    """The policies in force in each directory."""

    follows: Final = frozenset({Why.RENAMED, Why.ATTRIBUTED, Why.RECONCILED})

    def __init__(
        self,
        index: Index,
        configured: Mapping[str, Mapping[str, str]],
        tenants: Container[bytes] = (),
    ) -> None:
        """*configured*: the settings' policies by path below the mountpoint (``/``: the root).

        *tenants*: names of directories at the top of the mount that are tenants by the settings.
        """
        self._index = index
        self._configured = configured
        self._tenants = tenants
        self._cached: dict[InodeNo, DirectoryPolicy] = {}
        #: The shortest ttl of any directory since the start; None: there is none.
        self.shortest_ttl_s: float | None = None
        for said in configured.values():
            if "ttl" in said:
                self.note_ttl(said["ttl"].encode())

    def follow(self, changed: Changed) -> None:
        """Clear the cache if a directory changed, because directories below inherit from it."""
        record = changed.after
        if record is not None and stat.S_ISDIR(record.mode):
            self.clear()
            if TTL in changed.gained:
                self.note_ttl(changed.gained[TTL])

    def name_tenants(self, tenants: Container[bytes]) -> None:
        """The settings name others, as for the constructor."""
        self._tenants = tenants
        self.clear()

    def note_ttl(self, value: bytes) -> None:
        """Note that a directory has the ttl *value*; an invalid one is ignored."""
        with contextlib.suppress(ValueError):
            ttl_s = ttl_of(value)
            if ttl_s is not None and (self.shortest_ttl_s is None or ttl_s < self.shortest_ttl_s):
                self.shortest_ttl_s = ttl_s

    def of(self, directory: InodeNo) -> DirectoryPolicy:
        """Return the policy in force in *directory*, including what it inherits."""
        policy = self._cached.get(directory)
        if policy is not None:
            return policy
        # No recursion: a tree may be deeper than Python's stack.
        below: list[tuple[InodeNo, bytes]] = []
        policy, ascent = DirectoryPolicy(), Ascent()
        while (known := self._cached.get(directory)) is None:
            record = self._index.inode_or_miss(directory)
            if record is None or not ascent.goes_on(directory):
                break  # what is above a damaged directory is unknown
            below.append((directory, record.name))
            if directory == ROOT_INODE:
                break
            directory = record.parent
        else:
            policy = known
        if len(self._cached) + len(below) > _CACHED_MAX:
            self._cached.clear()
        # Above the first one that is to be found there is a known one, the root, or damage.
        path, above = path_of(self._index, directory) if self._configured else "", directory
        for left, (directory, name) in zip(range(len(below), 0, -1), reversed(below), strict=True):
            path = _below(path, name) if self._configured else ""
            policy = self._with(policy, directory, path)
            if above == ROOT_INODE != directory and self._is_tenant(directory, name):
                policy = policy._replace(tenant=directory)
            above = directory
            if left <= _CACHED_MAX:  # the upper part of a deeper tree is not cached
                self._cached[directory] = policy
        return policy

    def hide_drafts(self, directory: InodeNo) -> bool:
        """Whether only its maker can see a draft in *directory*."""
        policy = self.of(directory)
        return policy.drafts_of_owner or policy.only_renamed

    def clear(self) -> None:
        """Clear the cache, because a policy was set, or a directory moved."""
        self._cached.clear()

    def _with(self, inherited: DirectoryPolicy, directory: InodeNo, path: str) -> DirectoryPolicy:
        """Return *inherited* with the changes that *directory*, at *path*, sets itself."""
        for name, value in self._said(directory, path):
            if name == DRAFTS:
                inherited = inherited._replace(drafts_of_owner=value == b"owner")
            elif name == EVICT and value in VALUES[EVICT]:
                unit = directory if value == b"together" else NO_INODE
                inherited = inherited._replace(evict=value.decode(), unit=unit)
            elif name == LEASE:
                inherited = inherited._replace(leases=value == b"maker")
            elif name == PUBLISH:
                inherited = inherited._replace(only_renamed=value == b"rename")
            elif name == PIN:
                inherited = inherited._replace(pin=value == b"1")
            elif name == TTL:
                with contextlib.suppress(ValueError):
                    inherited = inherited._replace(ttl_s=ttl_of(value))
            elif name == HINT:
                with contextlib.suppress(ValueError):
                    hint = None if value == NO_HINT else hint_of(value)
                    inherited = inherited._replace(hint=hint)
        return inherited

    def _is_tenant(self, directory: InodeNo, name: bytes) -> bool:
        """Whether *directory*, *name* at the top of the mount, is a tenant: its attribute wins."""
        with contextlib.suppress(Damaged):
            if (said := self._index.xattr(directory, TENANT)) is not None:
                return said == IS_TENANT
        return name in self._tenants

    def _said(self, directory: InodeNo, path: str) -> list[tuple[bytes, bytes]]:
        """Return what *directory* itself sets; an attribute wins over the settings file."""
        said: dict[bytes, bytes] = {}
        for key, value in self._configured.get(path, {}).items():
            said[PREFIX + key.encode()] = value.encode()
        for name in NAMES:
            with contextlib.suppress(Damaged):  # an unreadable attribute sets nothing
                value_set = self._index.xattr(directory, name)
                if value_set is not None:
                    said[name] = value_set
        return list(said.items())


def _below(path: str, name: bytes) -> str:
    """Return the path of directory *name* below *path*; "" if it is too long for any setting.

    The root's *name* is empty.
    """
    if not name:
        return "/"
    if not path:
        return ""
    path = f"{path.rstrip('/')}/{name.decode(errors='surrogateescape')}"
    return path if len(path) < PATH_MAX_BYTES else ""


class UnitRoots:
    """The directories that set ``evict=together``, found by a scan after a start and kept since."""

    follows: Final = frozenset(
        {Why.ATTRIBUTED, Why.REPLACED, Why.REMOVED, Why.LOST, Why.RECONCILED}
    )

    def __init__(self) -> None:
        self._roots: set[InodeNo] = set()

    def follow(self, changed: Changed) -> None:
        """Enter or drop a directory."""
        if changed.after is None:
            self._roots.discard(changed.ino)
        elif EVICT in changed.gained:
            self.learn(changed.ino, changed.gained[EVICT])
        elif EVICT in changed.lost:
            self._roots.discard(changed.ino)

    def learn(self, ino: InodeNo, value: bytes) -> None:
        """Note the *value* of the attribute of directory *ino*."""
        if value == TOGETHER:
            self._roots.add(ino)
        else:
            self._roots.discard(ino)

    def all(self) -> list[InodeNo]:
        """Return the directories, oldest first."""
        return sorted(self._roots)


class TenantRules:
    """Keeps the entitlements of a mount as the attributes say, and the directories among them.

    A block is its owner's, or that of the directory at the top of the mount that it lies below, if
    that is a tenant. So it moves with a rename. What lies below a directory that becomes a tenant,
    or that moves, is counted anew by a scan (start_scan.py).
    """

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
