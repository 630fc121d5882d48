"""Tenants by uid and range, what they take, and who has an equal part: told from numbers."""

from typing import Final

import pytest

from kvfs.core.account import (
    ROOT,
    Accounts,
    Entitlement,
    Entitlements,
    StoredLately,
    Taken,
    TenantId,
    Tenants,
    UidRange,
    ranges_in,
    tenant_of_directory,
)
from kvfs.core.types import InodeNo

ALICE, BOB = TenantId(1000), TenantId(1001)
MIB: Final = 1 << 20
_HIGHEST_UID: Final = (1 << 32) - 2
SUBUID: Final = """
alice:100000:65536
1001:200000:65536
root:300000:65536
nobody-here:400000:65536
# a comment
alice:500000
alice:x:10
bob:0:10
bob:4294967290:10
bob:600000:0
"""
USERS: Final = {"root": 0, "alice": ALICE, "bob": BOB}


def tenants() -> Tenants:
    return Tenants(ranges_in(SUBUID, USERS))


@pytest.mark.parametrize(
    ("uid", "tenant"),
    [
        (0, ROOT),
        (ALICE, ALICE),
        (99_999, 99_999),
        (100_000, ALICE),
        (165_535, ALICE),
        (165_536, 165_536),
        (200_001, BOB),
        (300_001, 300_000),
        (465_535, 400_000),
        (600_000, 600_000),
        ((1 << 32) - 2, (1 << 32) - 2),
    ],
)
def test_a_range_is_its_owner_and_that_of_root_is_not_root(uid: int, tenant: int) -> None:
    assert tenants()[uid] == tenant


def test_lines_that_are_none_are_left_out() -> None:
    assert [each.first for each in ranges_in(SUBUID, USERS)] == [100_000, 200_000, 300_000, 400_000]


def test_of_ranges_that_overlap_the_higher_one_has_what_is_common() -> None:
    both = Tenants([UidRange(15, 20, BOB), UidRange(10, 30, ALICE)])
    assert [both[uid] for uid in (10, 15, 19)] == [ALICE, BOB, BOB]


def test_a_crowd_of_sub_uids_takes_together_what_one_user_may() -> None:
    taken = Taken(tenants())
    for uid in range(100_000, 100_050):
        taken.count(uid, 1)
    taken.count(BOB, 1)
    assert taken.by(ALICE) == 50
    assert taken.by(100_049) == 50
    assert dict(taken.rows()) == {ALICE: 50, BOB: 1}
    assert taken.has_its_part(100_777, 100)
    assert not taken.has_its_part(BOB, 100)


def test_who_takes_nothing_has_no_part_of_it_however_small_the_bound() -> None:
    taken = Taken(Tenants())
    assert not taken.has_its_part(ALICE, 0)
    taken.count(ALICE, 1)
    assert taken.has_its_part(ALICE, 0)
    taken.count(ALICE, -1)
    assert not taken.rows()
    assert taken.total == 0


def test_the_accounts_are_shown_by_uid_and_who_stores_most_comes_first() -> None:
    accounts = Accounts(tenants())
    accounts.stored.count(BOB, 5)
    accounts.stored.count(100_000, 7)
    accounts.open_files.count(0, 1)
    shown = accounts.shown(2, 100)
    assert list(shown) == ["1000", "1001"]
    assert shown["1000"]["stored_bytes"] == 7
    assert shown["1000"]["share_bytes"] == 50
    assert accounts.shown(3, 100)["0"]["open_files"] == 1


def test_a_directory_is_shown_by_its_path_while_it_is_a_tenant() -> None:
    """No uid is its number: the highest of a user is no directory's."""
    accounts, team = Accounts(tenants()), tenant_of_directory(InodeNo(0))
    assert team > _HIGHEST_UID
    accounts.stored.count(team, 7)
    accounts.directories[team] = "/team-a"
    assert accounts.shown(9, 100)["/team-a"]["stored_bytes"] == 7
    del accounts.directories[team]
    assert accounts.shown(9, 100) == {}


def test_who_has_a_quota_is_shown_though_it_stores_nothing() -> None:
    accounts = Accounts(
        tenants(), Entitlements({ALICE: Entitlement(3.0, 20), BOB: Entitlement(1.0)})
    )
    accounts.stored.count(BOB, 5)
    shown = accounts.shown(9, 100)
    assert shown["1000"]["weight"] == 3.0
    assert shown["1000"]["quota_bytes"] == shown["1000"]["share_bytes"] == 20
    assert shown["1001"]["quota_bytes"] is None
    assert shown["1001"]["share_bytes"] == 100


def lately(*stored: tuple[int, int]) -> StoredLately:
    taken = Taken(tenants())
    made = StoredLately(taken)
    for uid, size_bytes in stored:
        taken.count(uid, size_bytes * MIB)
    made.remember(0.0)
    taken.begin_anew()
    return made


@pytest.mark.parametrize(
    ("stored", "held", "left_to_them"),
    [
        ((), (), None),
        (((ALICE, 900),), (), None),
        (((100_000, 900),), (), None),
        (((BOB, 300),), (), 300),
        (((BOB, 900),), (), 500),
        (((BOB, 1),), (), 1),
        (((ALICE, 900), (BOB, 300)), (), 300),
        (((BOB, 900), (0, 900)), (), 666),
        (((BOB, 100), (0, 900)), (), 433),
        (((BOB, 300),), ((BOB, 100),), 200),
        (((BOB, 300),), ((BOB, 400),), 0),
        (((BOB, 300),), ((ALICE, 100),), 300),
        (((BOB, 100), (0, 900)), ((BOB, 90), (0, 900)), 10),
    ],
)
def test_what_others_could_lose_of_1000(
    stored: tuple[tuple[int, int], ...], held: tuple[tuple[int, int], ...], left_to_them: int | None
) -> None:
    """What they have stored, up to an equal part, and do not hold."""
    holds = Taken(tenants())
    for uid, size_bytes in held:
        holds.count(uid, size_bytes * MIB)
    told = lately(*stored).unheld_bytes(ALICE, 1000 * MIB, holds)
    assert (told if told is None else told // MIB) == left_to_them


def test_what_was_stored_and_evicted_is_forgotten_by_and_by() -> None:
    made, nothing = lately((BOB, 400)), Taken(tenants())
    left = []
    for now_s in (0.0, 600.0, 1200.0, 36_000.0):
        made.remember(now_s)
        left.append(made.unheld_bytes(ALICE, 1000 * MIB, nothing))
    assert left == [400 * MIB, 200 * MIB, 100 * MIB, None]


def test_a_crowd_of_uids_costs_bounded_memory() -> None:
    """A range may have millions, and whoever may use it can show each of them."""
    known = tenants()
    for uid in range(100_000, 165_536):
        assert known[uid] == ALICE
    assert len(known) <= 4096
