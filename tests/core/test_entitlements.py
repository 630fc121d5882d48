"""What the settings say that tenants may store, and the share that follows."""

import re
from typing import Final

import pytest

from kvfs.core.account import Entitlement, Entitlements, TenantId, Tenants, UidRange
from kvfs.core.entitlements import entitled, entitled_by, entitled_directories, tenants_table
from kvfs.core.errors import UsageError
from kvfs.core.settings import Settings

ALICE, BOB, CAROL = TenantId(1000), TenantId(1001), TenantId(1002)
USERS: Final = {"alice": ALICE, "bob": BOB}
GIB: Final = 1 << 30


def test_users_by_name_or_number_and_all_uids_that_are_theirs() -> None:
    tenants = Tenants([UidRange(100_000, 165_536, ALICE)])
    table = tenants_table(
        {"100007": {"quota": "1.5G", "weight": 3}, "bob": {"weight": "0.5"}, "7": {"quota": 4096}}
    )
    found, remarks = entitled(table, USERS, tenants)
    assert remarks == []
    assert found == {
        ALICE: Entitlement(3.0, 3 * GIB // 2),
        BOB: Entitlement(0.5),
        TenantId(7): Entitlement(1.0, 4096),
    }
    assert Entitlements(found).quotas_bytes == {ALICE: 3 * GIB // 2, TenantId(7): 4096}
    assert Entitlements(found).of(CAROL) == Entitlement(1.0, None)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("alice", r"must be a table: write [tenants.USER]"),
        ({"alice": "100G"}, "'alice': write [tenants.USER]"),
        ({"alice": {"quota": "much"}}, "alice: quota: 'much' is not a size"),
        ({"alice": {"weight": "much"}}, "alice: weight: 'much' is no number"),
        ({"alice": {"weight": 0}}, "alice: weight: 0 is outside 0.000001 .. 1000000"),
        ({"alice": {"weight": "nan"}}, "alice: weight: nan is outside"),
        ({"alice": {"share": 1}}, "alice: unknown 'share'; use quota or weight"),
        ({"/a/b": {"weight": 1}}, "'/a/b' is no directory at the top of the mount"),
        ({"/..": {"weight": 1}}, "'/..' is no directory at the top of the mount"),
        ({"/": {"weight": 1}}, "'/' is no directory at the top of the mount"),
    ],
)
def test_what_is_no_table_of_tenants_says_why(table: object, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        tenants_table(table)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["carol"], "tenants: 'carol' is no user of /etc/passwd; give its uid"),
        (["alice", "1000"], "tenants: '1000' is the same tenant as one before"),
    ],
)
def test_who_is_nobody_or_named_twice_says_so(names: list[str], why: str) -> None:
    found, (remark,) = entitled({name: {"weight": "2"} for name in names}, USERS, Tenants())
    assert remark.startswith(why)
    assert len(found) == len(names) - 1


def test_the_settings_file_has_them_by_user() -> None:
    text = '[tenants.alice]\nquota = "100G"\n[tenants.1001]\nweight = 30\n'
    settings = Settings.from_toml(text)
    found, _ = entitled(settings.tenants, USERS, Tenants())
    assert found == {ALICE: Entitlement(1.0, 100 * GIB), BOB: Entitlement(30.0)}
    with pytest.raises(UsageError, match="settings: tenants: alice: quota"):
        Settings.from_toml('[tenants.alice]\nquota = "x"\n')


def test_the_settings_file_has_directories_by_their_path() -> None:
    table = Settings.from_toml(
        '[tenants."/team-a"]\nquota = "2G"\n[tenants.7]\nweight = 2\n'
    ).tenants
    assert entitled_directories(table) == {b"team-a": Entitlement(1.0, 2 * GIB)}
    assert entitled(table, USERS, Tenants()) == ({TenantId(7): Entitlement(2.0)}, [])


def test_attributes_of_a_directory_go_over_the_settings_and_what_is_no_value_says_nothing() -> None:
    configured = Entitlement(3.0, GIB)
    for attributes, entitlement in (
        ({}, configured),
        ({b"user.kvfs.quota": b"2G", b"user.kvfs.tenant": b"1"}, Entitlement(3.0, 2 * GIB)),
        ({b"user.kvfs.quota": b"none", b"user.kvfs.weight": b"5"}, Entitlement(5.0, None)),
        ({b"user.kvfs.quota": b"much", b"user.kvfs.weight": b"\xff"}, configured),
        ({b"user.kvfs.quota.7": b"2G", b"user.other": b"1"}, configured),
    ):
        assert entitled_by(configured, attributes) == entitlement


def test_a_share_is_what_a_weight_is_of_those_that_store_and_no_more_than_the_quota() -> None:
    made = Entitlements(
        {ALICE: Entitlement(50.0), BOB: Entitlement(30.0), CAROL: Entitlement(20.0, 100)}
    )
    assert made.share_bytes(ALICE, 1000, [ALICE, BOB, CAROL]) == 500
    assert made.share_bytes(ALICE, 1000, [BOB]) == 625
    assert made.share_bytes(CAROL, 1000, [ALICE, BOB, CAROL]) == 100
    assert made.share_bytes(BOB, 1000, []) == 1000
