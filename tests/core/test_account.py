"""Tenants by uid and range, what they take, and who has an equal part: told from numbers."""

from typing import Final

import pytest

from kvfs.core.account import ROOT, Accounts, Taken, TenantId, Tenants, UidRange, ranges_in

ALICE, BOB = TenantId(1000), TenantId(1001)
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
    assert tenants().of(uid) == tenant


def test_lines_that_are_none_are_left_out() -> None:
    assert [each.first for each in ranges_in(SUBUID, USERS)] == [100_000, 200_000, 300_000, 400_000]


def test_of_ranges_that_overlap_the_higher_one_has_what_is_common() -> None:
    both = Tenants([UidRange(15, 20, BOB), UidRange(10, 30, ALICE)])
    assert [both.of(uid) for uid in (10, 15, 19)] == [ALICE, BOB, BOB]


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
    shown = accounts.shown(2)
    assert list(shown) == ["1000", "1001"]
    assert shown["1000"]["stored_bytes"] == 7
    assert accounts.shown(3)["0"]["open_files"] == 1
