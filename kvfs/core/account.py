"""Accounts: what each tenant takes of what all need. Every limit of a tenant asks and tells them.

A tenant is a user, with the ids that /etc/subuid lends that user: whoever may use a range of ids
could otherwise be as many tenants as it has numbers. A range that belongs to root, or to a user
without a number here, is a tenant of its own.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, NewType

#: The tenant's uid, or the first number of its range.
TenantId = NewType("TenantId", int)
ROOT: Final = TenantId(0)
#: (uid_t)-1 is no user (chown(2)); no number of a user is higher.
_UID_END: Final = (1 << 32) - 1


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


class Tenants:
    """Which tenant each uid belongs to."""

    def __init__(self, ranges: Iterable[UidRange] = ()) -> None:
        """Of two *ranges* that have a uid in common the one that begins higher has it."""
        self._ranges: Final = sorted(ranges)
        self._firsts: Final = [each.first for each in self._ranges]

    def of(self, uid: int) -> TenantId:
        """Return the tenant that *uid* belongs to."""
        at = bisect_right(self._firsts, uid)
        if at and uid < self._ranges[at - 1].end:
            return self._ranges[at - 1].tenant
        return TenantId(uid)


class Taken:
    """How much of one thing each tenant takes: a column of the accounts."""

    def __init__(self, tenants: Tenants) -> None:
        self._of: Final = tenants.of
        self._by_tenant: dict[TenantId, int] = {}
        #: What all tenants take together.
        self.total = 0

    def count(self, uid: int, change: int) -> None:
        """Count *change* more, or less if negative, for the tenant of *uid*."""
        tenant = self._of(uid)
        self.total += change
        taken = self._by_tenant.get(tenant, 0) + change
        if taken > 0:
            self._by_tenant[tenant] = taken
        else:
            self._by_tenant.pop(tenant, None)

    def by(self, uid: int) -> int:
        """Return what the tenant of *uid* takes."""
        return self._by_tenant.get(self._of(uid), 0)

    def has_its_part(self, uid: int, bound: int) -> bool:
        """Whether the tenant of *uid* takes an equal part of *bound* or more.

        It is the part of each tenant that takes some: what others do not use is lent.
        """
        taken = self.by(uid)
        return taken > 0 and taken >= bound / len(self._by_tenant)

    def rows(self) -> Mapping[TenantId, int]:
        """Return what each tenant takes that takes some."""
        return self._by_tenant

    def begin_anew(self) -> None:
        """Forget all that was counted."""
        self._by_tenant.clear()
        self.total = 0


class Accounts:
    """The accounts of all tenants, one column for each thing that they take."""

    def __init__(self, tenants: Tenants | None = None) -> None:
        """Without *tenants* each uid is one."""
        self.tenants: Final = Tenants() if tenants is None else tenants
        #: Bytes of blocks that have a name and are whole.
        self.stored: Final = Taken(self.tenants)
        #: Of these the bytes that are leased (leases.py).
        self.leased: Final = Taken(self.tenants)
        #: The bytes under pins when they were set (ranks.py), by owner.
        self.pinned: Final = Taken(self.tenants)
        #: Bytes of names and attributes that are never evicted; root's are not counted.
        self.names: Final = Taken(self.tenants)
        #: Open files that cost the server a descriptor (handles.py).
        self.open_files: Final = Taken(self.tenants)

    def shown(self, most: int) -> dict[str, dict[str, int]]:
        """Return the accounts of the *most* tenants that store most, by uid, JSON-ready."""
        columns = {
            "stored_bytes": self.stored.rows(),
            "leased_bytes": self.leased.rows(),
            "pinned_bytes": self.pinned.rows(),
            "names_bytes": self.names.rows(),
            "open_files": self.open_files.rows(),
        }
        stored = self.stored.rows()
        tenants = sorted(
            set[TenantId]().union(*columns.values()), key=lambda each: (-stored.get(each, 0), each)
        )
        return {
            str(tenant): {name: rows.get(tenant, 0) for name, rows in columns.items()}
            for tenant in tenants[:most]
        }
