"""Accounts: what each tenant takes of what all need. Every limit of a tenant asks and tells them.

A tenant is a user, with the ids that /etc/subuid lends that user: whoever may use a range of ids
could otherwise be as many tenants as it has numbers. A range that belongs to root, or to a user
without a number here, is a tenant of its own. So is a directory at the top of the mount that the
settings or an attribute name (entitlements.py): what lies below it is nobody else's.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, NewType

from kvfs.core.types import InodeNo

#: The tenant's uid, or the first number of its range; of a directory a number that no uid is.
TenantId = NewType("TenantId", int)
ROOT: Final = TenantId(0)
#: (uid_t)-1 is no user (chown(2)); no number of a user is higher.
_UID_END: Final = (1 << 32) - 1
_DIRECTORIES: Final = 1 << 32
#: Uids whose tenant is remembered: a range may have millions.
_UIDS_MAX: Final = 4096
#: Half of what a tenant has stored once, and no longer, is forgotten in this time; and all of it
#: once it is less than a tenant has that only tries whether it may store.
_FORGOTTEN_S: Final = 600.0
_NOTHING_BYTES: Final = 64 << 10
#: This share of a pool cannot be kept from eviction: it is for tenants that have stored less.
SPARE_SHARE: Final = 1 / 16


def tenant_of_directory(ino: InodeNo) -> TenantId:
    """Return the tenant that directory *ino* is."""
    return TenantId(_DIRECTORIES + ino)


def is_directory(tenant: TenantId) -> bool:
    """Whether *tenant* is a directory, and no user."""
    return tenant >= _DIRECTORIES


def directory_of_tenant(tenant: TenantId) -> InodeNo:
    """Return the directory that *tenant*, one of them, is."""
    return InodeNo(tenant - _DIRECTORIES)


class UidRange(NamedTuple):
    """Uids from *first* up to, not including, *end*, which are all one *tenant*."""

    first: int
    end: int
    tenant: TenantId


def ranges_in(subuid: str, users: Mapping[str, int]) -> Iterator[UidRange]:
    """Yield the ranges of *subuid*, the text of subuid(5); *users* are uids by name.

    A line that is none, or a range that has root in it, is left out.
    """
    for line in subuid.splitlines():
        owner, *numbers = line.strip().split(":")
        if len(numbers) != 2 or not all(map(_is_number, numbers)):
            continue
        first, count = map(int, numbers)
        if not 0 < first < first + count <= _UID_END:
            continue
        uid = users.get(owner, int(owner) if _is_number(owner) else 0)
        yield UidRange(first, first + count, TenantId(uid or first))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


class Tenants(dict[int, TenantId]):
    """The tenant of each uid that was asked for: ``tenants[uid]``."""

    def __init__(self, ranges: Iterable[UidRange] = ()) -> None:
        """Of two *ranges* that have a uid in common the one that begins higher has it."""
        super().__init__()
        self._ranges: Final = sorted(ranges)
        self._firsts: Final = [each.first for each in self._ranges]

    def __missing__(self, uid: int) -> TenantId:
        """Find out which tenant *uid* belongs to."""
        if len(self) >= _UIDS_MAX:
            self.clear()
        at = bisect_right(self._firsts, uid)
        belongs = at > 0 and uid < self._ranges[at - 1].end
        self[uid] = tenant = self._ranges[at - 1].tenant if belongs else TenantId(uid)
        return tenant


class Taken:
    """How much of one thing each tenant takes: a column of the accounts."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants: Final = tenants
        self._by_tenant = Counter[TenantId]()
        #: What all tenants take together.
        self.total = 0

    def count(self, uid: int, change: int) -> None:
        """Count *change* more, or less if negative, for the tenant of *uid*."""
        self.total += change
        self._by_tenant[self.tenants[uid]] += change

    def by(self, uid: int) -> int:
        """Return what the tenant of *uid* takes."""
        return max(0, self._by_tenant[self.tenants[uid]])

    def has_its_part(self, uid: int, bound: int) -> bool:
        """Whether the tenant of *uid* takes an equal part of *bound* or more.

        The bound is divided by the tenants that take some of it now; unused parts are lent.
        """
        taken = self.by(uid)
        return taken > 0 and taken >= bound / len(self.rows())

    def rows(self) -> Mapping[TenantId, int]:
        """Return what each tenant takes that takes some."""
        return {tenant: taken for tenant, taken in self._by_tenant.items() if taken > 0}

    def begin_anew(self) -> None:
        """Forget all that was counted."""
        self._by_tenant.clear()
        self.total = 0


class Entitlement(NamedTuple):
    """What one tenant may store."""

    #: How large a part of the pool, beside others'.
    weight: float = 1.0
    #: How many bytes of blocks it may store; None: as many as it likes.
    quota_bytes: int | None = None


NO_ENTITLEMENT: Final = Entitlement()


class Entitlements:
    """Those of all tenants of a mount."""

    def __init__(self, configured: Mapping[TenantId, Entitlement], idle_s: float = 0.0) -> None:
        """*configured*: of those that the settings name.

        A tenant that has used no block for *idle_s* has no share (fair_shares.py); 0: it keeps it.
        """
        self._configured: Final = dict(configured)
        self._of: Final = dict(configured)
        self.idle_s = idle_s
        #: How many bytes each tenant that has a quota may store.
        self.quotas_bytes: Final[dict[TenantId, int]] = {}
        for tenant, entitled in configured.items():
            self.entitle(tenant, entitled)

    def begin_anew(self, configured: Mapping[TenantId, Entitlement], idle_s: float) -> None:
        """The settings say else now, as in the constructor; what attributes say is to be told."""
        for table in (self._configured, self._of, self.quotas_bytes):
            table.clear()
        self.idle_s = idle_s
        for tenant, entitled in configured.items():
            self.configure(tenant, entitled)

    def entitle(self, tenant: TenantId, entitled: Entitlement) -> None:
        """Let *tenant* store what it is *entitled* to from now on."""
        self._of[tenant] = entitled
        if entitled.quota_bytes is None:
            self.quotas_bytes.pop(tenant, None)
        else:
            self.quotas_bytes[tenant] = entitled.quota_bytes

    def configure(self, tenant: TenantId, entitled: Entitlement) -> None:
        """The settings say now what *tenant* is *entitled* to; nothing else does yet."""
        self._configured[tenant] = entitled
        self.entitle(tenant, entitled)

    def forget(self, tenant: TenantId) -> None:
        """*tenant*, a directory, is none any more."""
        for table in (self._configured, self._of, self.quotas_bytes):
            table.pop(tenant, None)

    def configured(self, tenant: TenantId) -> Entitlement:
        """Return what the settings say of *tenant*."""
        return self._configured.get(tenant, NO_ENTITLEMENT)

    def of(self, tenant: TenantId) -> Entitlement:
        """Return what *tenant* may store."""
        return self._of.get(tenant, NO_ENTITLEMENT)

    def named(self) -> Collection[TenantId]:
        """Return the tenants that are entitled to else than others."""
        return self._of.keys()

    def share_bytes(self, tenant: TenantId, whole_bytes: int, storing: Iterable[TenantId]) -> int:
        """Return what *tenant* may store of *whole_bytes* while those that are *storing* want more.

        No more than its quota.
        """
        weights = sum(self.of(each).weight for each in {tenant, *storing})
        own = self.of(tenant)
        part_bytes = int(whole_bytes * own.weight / weights)
        return part_bytes if own.quota_bytes is None else min(part_bytes, own.quota_bytes)


class Accounts:
    """The accounts of all tenants, one column for each thing that they take."""

    def __init__(
        self,
        tenants: Tenants | None = None,
        entitlements: Entitlements | None = None,
    ) -> None:
        """Without *tenants* each uid is one. Without *entitlements* all share alike."""
        self.tenants: Final = Tenants() if tenants is None else tenants
        self.entitlements: Final = entitlements or Entitlements({})
        #: The paths, below the mountpoint, of the directories that are tenants.
        self.directories: Final[dict[TenantId, str]] = {}
        #: Bytes of blocks that have a name and are whole.
        self.stored: Final = Taken(self.tenants)
        self.lately: Final = StoredLately(self.stored)
        #: Of these the bytes that are leased (leases.py).
        self.leased: Final = Taken(self.tenants)
        #: Bytes of slabs of living processes (lifecycle.py).
        self.slabs: Final = Taken(self.tenants)
        #: What is kept from eviction, as last counted: leases, slabs and pins, and open files
        #: (mount/files/held_shares.py).
        self.held: Final = Taken(self.tenants)
        #: Of these the bytes of drafts.
        self.drafts: Final = Taken(self.tenants)
        #: All that is kept from eviction or cannot go, each byte once, as last counted.
        self.kept_bytes = 0
        #: The bytes under pins when they were set (ranks.py), by owner.
        self.pinned: Final = Taken(self.tenants)
        #: Bytes of names and attributes that are never evicted; root's are not counted.
        self.names: Final = Taken(self.tenants)
        #: What its requests that wait for room hold in memory (held_shares.py).
        self.waiting: Final = Taken(self.tenants)
        #: Pieces of work that its requests wait for, or have left behind (device_shares.py).
        self.device_work: Final = Taken(self.tenants)
        #: Open files that cost the server a descriptor (handles.py).
        self.open_files: Final = Taken(self.tenants)

    def left_bytes(self, tenant: TenantId, whole_bytes: int) -> int | None:
        """Return how much more of *whole_bytes* *tenant* may keep from eviction, by the last count.

        What is left goes to others: what they have stored lately, and a part for those who have
        little. Below 0 more is kept already than may be. None: there is no bound.
        """
        unheld_bytes = self.lately.unheld_bytes(tenant, whole_bytes, self.held)
        if unheld_bytes is None:
            return None
        return whole_bytes - self.kept_bytes - unheld_bytes - int(whole_bytes * SPARE_SHARE)

    def shown(self, most: int, whole_bytes: int) -> dict[str, dict[str, float | None]]:
        """Return the accounts of the *most* tenants that store most, by uid or path, JSON-ready.

        Shares are of *whole_bytes*.
        """
        columns = {
            "stored_bytes": self.stored.rows(),
            "held_bytes": self.held.rows(),
            "leased_bytes": self.leased.rows(),
            "slab_bytes": self.slabs.rows(),
            "pinned_bytes": self.pinned.rows(),
            "names_bytes": self.names.rows(),
            "open_files": self.open_files.rows(),
            "waiting_bytes": self.waiting.rows(),
            "device_waits": self.device_work.rows(),
        }
        stored = self.stored.rows()
        named = (*self.entitlements.named(), *self.directories)
        known = {each for each in set().union(*columns.values(), named) if self._is_there(each)}
        tenants = sorted(known, key=lambda each: (-stored.get(each, 0), each))
        shown: dict[str, dict[str, float | None]] = {}
        for tenant in tenants[:most]:
            row: dict[str, float | None] = {}
            row |= {name: rows.get(tenant, 0) for name, rows in columns.items()}
            shown[self.name_of(tenant)] = row
            entitled = self.entitlements.of(tenant)
            row["weight"], row["quota_bytes"] = entitled.weight, entitled.quota_bytes
            row["share_bytes"] = self.entitlements.share_bytes(tenant, whole_bytes, stored)
        return shown

    def name_of(self, tenant: TenantId) -> str:
        """Return the uid of *tenant*, or the path of its directory below the mountpoint."""
        return self.directories.get(tenant, str(tenant))

    def _is_there(self, tenant: TenantId) -> bool:
        """Whether *tenant* is a user, or a directory that is a tenant still."""
        return not is_directory(tenant) or tenant in self.directories


class StoredLately:
    """The most that each tenant has stored of late: others that evict it may not hold that room."""

    def __init__(self, stored: Taken) -> None:
        self._stored: Final = stored
        self._most: dict[TenantId, float] = {}
        self._noted_s = 0.0

    def remember(self, now_s: float) -> None:
        """Take what each has stored now; of what was more, half is forgotten in ten minutes."""
        kept = 0.5 ** ((now_s - self._noted_s) / _FORGOTTEN_S)
        self._noted_s = now_s
        most = {tenant: kept * before for tenant, before in self._most.items()}
        for tenant, stored in self._stored.rows().items():
            most[tenant] = max(most.get(tenant, 0.0), stored)
        self._most = {tenant: each for tenant, each in most.items() if each > _NOTHING_BYTES}

    def unheld_bytes(self, uid: int, whole_bytes: int, held: Taken) -> int | None:
        """Return what others than the tenant of *uid* could lose if it kept more from eviction.

        That is what each has stored lately, up to an equal part of *whole_bytes*, and does not
        keep itself by what it has *held*. None if nobody else has stored anything.
        """
        own = self._stored.tenants[uid]
        others = {tenant: most for tenant, most in self._most.items() if tenant != own}
        if not others:
            return None
        part_bytes = whole_bytes // (1 + len(others))
        return sum(
            max(0, min(int(most), part_bytes) - held.by(tenant)) for tenant, most in others.items()
        )
