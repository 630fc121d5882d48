"""Tenants in a full pool: one that stores more than its share makes room for itself."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.account import Accounts, Entitlement, Entitlements, TenantId
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.driven import Driven
from tests.support.store.stores import FILE, MIB, Host, assert_exact, host, settle, write

BLOCK_BYTES: Final = MIB // 2
CAPACITY_BYTES: Final = 64 * MIB
FITS: Final = CAPACITY_BYTES // BLOCK_BYTES
ALICE, BOB, CAROL = 1000, 1001, 1002
#: Two points of the pool.
TWO_POINTS: Final = FITS * 2 // 100


@pytest.fixture
def running() -> Iterator[Host]:
    with host(capacity_bytes=CAPACITY_BYTES) as made:
        made.start()
        settle(made.store)
        yield made


class Storing:
    """Stores blocks of users, each in a burst of its own."""

    def __init__(self, store: Driven) -> None:
        self.store = store
        self._number = 0
        self._now_s = store.now_s()

    def put(self, uid: int, blocks: int = 1) -> list[InodeNo]:
        return [self._put(uid) for _ in range(blocks)]

    def _put(self, uid: int) -> InodeNo:
        self._number += 1
        name = b"%d-%d" % (uid, self._number)
        opened, _ = self.store.create(ROOT_INODE, name + b".tmp", FILE, uid, uid)
        write(self.store, opened, name[:1] * BLOCK_BYTES)
        self.store.close(opened, writer=True)
        self.store.rename(ROOT_INODE, name + b".tmp", ROOT_INODE, name)
        self._now_s += 10
        self.store.tick_heat(self._now_s)
        return opened.ino

    def blocks(self) -> Counter[int]:
        """Return how many blocks each user has."""
        rows = self.store.records()
        return Counter(record.uid for ino, record in rows.items() if ino != ROOT_INODE)


def test_a_flood_takes_no_more_than_its_share(running: Host) -> None:
    storing = Storing(running.store)
    storing.put(BOB, FITS)
    storing.put(ALICE, 2 * FITS)
    assert storing.blocks()[BOB] == pytest.approx(FITS / 2, abs=TWO_POINTS)
    storing.put(ALICE, FITS)
    assert storing.blocks()[BOB] == pytest.approx(FITS / 2, abs=TWO_POINTS)
    assert_exact(running)


def test_the_order_within_a_tenant_is_that_of_the_policy(running: Host) -> None:
    storing = Storing(running.store)
    bob = storing.put(BOB, FITS // 4)
    alice = storing.put(ALICE, FITS)
    known = running.store.records()
    assert all(ino in known for ino in bob)
    left = [ino in known for ino in alice]
    assert left == sorted(left)


def test_several_tenants_that_want_more_have_an_equal_part_each(running: Host) -> None:
    storing = Storing(running.store)
    storing.put(ALICE, FITS)
    for _ in range(3 * FITS // 3):
        for uid in (ALICE, BOB, CAROL):
            storing.put(uid)
    for uid in (ALICE, BOB, CAROL):
        assert storing.blocks()[uid] == pytest.approx(FITS / 3, abs=TWO_POINTS)


def test_what_one_does_not_use_is_lent_and_comes_back(running: Host) -> None:
    storing = Storing(running.store)
    storing.put(BOB, 4)
    storing.put(ALICE, FITS)
    blocks = storing.blocks()
    assert blocks[BOB] == 4
    assert blocks[ALICE] > FITS - 4 - 2 * TWO_POINTS
    for _ in range(FITS):
        storing.put(BOB)
        storing.put(ALICE)
    assert storing.blocks()[BOB] == pytest.approx(FITS / 2, abs=TWO_POINTS)


def test_who_is_idle_for_long_has_no_share(running: Host) -> None:
    running.stop()
    store = running.start(accounts=Accounts(entitlements=Entitlements({}, idle_s=3600)))
    settle(store)
    storing = Storing(store)
    storing.put(BOB, FITS // 2)
    storing.put(CAROL, FITS // 8)
    store.tick()  # the time of their last use is noted
    store.let_days_pass(1 / 12)
    store.tick()
    storing.put(ALICE, FITS)
    assert storing.blocks()[BOB] == storing.blocks()[CAROL] == 0
    storing.put(BOB, FITS)
    assert storing.blocks()[BOB] == pytest.approx(FITS / 2, abs=TWO_POINTS)


def test_a_block_counts_for_who_owns_it_now(running: Host) -> None:
    """chown moves it: its new owner has more than its share then."""
    store = running.store
    storing = Storing(store)
    bob = storing.put(BOB, FITS // 2)
    storing.put(ALICE, FITS // 4)
    for ino in bob[: FITS // 4]:
        store.change(ino, uid=ALICE)
    storing.put(CAROL, FITS // 2)
    known = store.records()
    assert all(ino in known for ino in bob[FITS // 4 :]), "a quarter, as it has now"
    assert not any(ino in known for ino in bob[: FITS // 8])


def test_the_next_server_knows_whose_the_blocks_are(running: Host) -> None:
    storing = Storing(running.store)
    storing.put(BOB, FITS // 2)
    storing.put(ALICE, FITS // 2 - 4)
    settle(running.store)
    running.stop()
    store = running.start()
    settle(store)
    storing = Storing(store)
    storing.put(ALICE, FITS)
    assert storing.blocks()[BOB] == pytest.approx(FITS / 2, abs=TWO_POINTS)


@pytest.mark.parametrize("eviction", ["arc", "adaptive"])
def test_every_policy_leaves_others_their_share(running: Host, eviction: str) -> None:
    running.stop()
    running.start(settings=dataclasses.replace(running.settings, eviction=eviction))
    settle(running.store)
    storing = Storing(running.store)
    storing.put(BOB, FITS)
    storing.put(ALICE, 2 * FITS)
    assert storing.blocks()[BOB] == pytest.approx(FITS / 2, abs=TWO_POINTS)


def entitled(running: Host, **said: Entitlement) -> Storing:
    """Start anew, with what each of ``uid1000`` and so on may store."""
    running.stop()
    of = {TenantId(int(name.removeprefix("uid"))): each for name, each in said.items()}
    store = running.start(accounts=Accounts(entitlements=Entitlements(of)))
    settle(store)
    return Storing(store)


def test_each_has_what_its_weight_is_of_all_and_what_is_lent_comes_back(running: Host) -> None:
    storing = entitled(
        running, uid1000=Entitlement(50), uid1001=Entitlement(30), uid1002=Entitlement(20)
    )
    storing.put(BOB, FITS)
    for _ in range(3 * FITS // 3):
        for uid in (ALICE, BOB, CAROL):
            storing.put(uid)
    for uid, part in ((ALICE, 0.5), (BOB, 0.3), (CAROL, 0.2)):
        assert storing.blocks()[uid] == pytest.approx(FITS * part, abs=TWO_POINTS)
    store = storing.store
    for name, record in [(row.name, row) for row in store.records().values()]:
        if record.uid == ALICE:
            store.unlink(ROOT_INODE, name)
    store.erase_removed()
    for _ in range(FITS):
        storing.put(BOB)
        storing.put(CAROL)
    for uid, part in ((BOB, 0.6), (CAROL, 0.4)):
        assert storing.blocks()[uid] == pytest.approx(FITS * part, abs=TWO_POINTS)
    storing.put(ALICE, FITS)
    for uid, part in ((ALICE, 0.5), (BOB, 0.3), (CAROL, 0.2)):
        assert storing.blocks()[uid] == pytest.approx(FITS * part, abs=TWO_POINTS)


def test_what_is_above_a_quota_goes_ahead_of_need_and_is_its_owners_coldest(running: Host) -> None:
    storing = entitled(running, uid1000=Entitlement(quota_bytes=10 * BLOCK_BYTES))
    bob = storing.put(BOB, 5)
    alice = storing.put(ALICE, 15)
    storing.store.tick()
    assert storing.blocks() == {BOB: 5, ALICE: 10}
    assert [ino in storing.store.records() for ino in alice] == [False] * 5 + [True] * 10
    assert all(ino in storing.store.records() for ino in bob)
    assert storing.store.describe()["cache"]["evicted"]["quota"]["blocks"] == 5
    storing.put(ALICE, 3)
    storing.store.tick()
    assert storing.blocks()[ALICE] == 10


def test_one_tenant_alone_has_its_quota_too(running: Host) -> None:
    storing = entitled(running, uid1000=Entitlement(quota_bytes=10 * BLOCK_BYTES))
    storing.put(ALICE, 40)
    storing.store.tick()
    assert storing.blocks() == {ALICE: 10}
    storing.store.tick()
    assert storing.blocks() == {ALICE: 10}


def test_nothing_goes_for_a_quota_before_it_is_known_whose_all_blocks_are(running: Host) -> None:
    storing = Storing(running.store)
    storing.put(BOB, 4)
    storing.put(ALICE, 4)
    running.stop()
    none = {TenantId(ALICE): Entitlement(quota_bytes=0)}
    store = running.start(accounts=Accounts(entitlements=Entitlements(none)))
    storing = Storing(store)
    storing.put(ALICE)
    assert storing.blocks() == {BOB: 4, ALICE: 5}
    settle(store)
    store.tick()
    assert storing.blocks() == {BOB: 4}


def test_what_root_says_on_the_root_directory_counts_for_all_servers(
    running: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a power loss; a weight counts for what is stored already."""
    caplog.set_level("ERROR")
    storing = Storing(running.store)
    storing.put(BOB, FITS // 2)
    storing.put(ALICE, FITS)
    running.store.set_xattr(ROOT_INODE, b"user.kvfs.weight.1000", b"3")
    storing.put(ALICE, FITS)
    assert storing.blocks()[BOB] == pytest.approx(FITS / 4, abs=TWO_POINTS)
    running.store.set_xattr(ROOT_INODE, b"user.kvfs.quota.1001", b"4M")
    storing.store.tick()
    assert storing.blocks()[BOB] == 4 * MIB // BLOCK_BYTES
    settle(running.store)
    running.lose_power()
    running.start()
    settle(running.store)
    told = running.store.describe()["tenants"]
    assert (told["1000"]["weight"], told["1001"]["quota_bytes"]) == (3.0, 4 * MIB)
    running.store.remove_xattr(ROOT_INODE, b"user.kvfs.weight.1000")
    assert running.store.describe()["tenants"]["1000"]["weight"] == 1.0
