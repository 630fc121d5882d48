"""Whose the blocks are, beside the heat: no rows for one tenant, and sums that always agree."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.account import Entitlements, TenantId, tenant_of_directory
from kvfs.core.block_owners import Owners
from kvfs.core.eviction_policy import Rank
from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.storage.heat import Heat
from kvfs.storage.heat_columns import SLOTS_MAX, HeatTenants
from tests.support.store.heats import MIB, NOW_S, opened

ALICE, BOB, CAROL = TenantId(1000), TenantId(1001), TenantId(1002)


@pytest.fixture
def heat(tmp_path: Path) -> Iterator[Heat]:
    """A heat without a block, in which all tenants are told."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    made = opened(fd)
    made.know_tenants()
    yield made
    os.close(fd)


def store(heat: Heat, tenant: TenantId, *inos: int, size_bytes: int = MIB) -> None:
    for ino in inos:
        heat.put(InodeNo(ino), size_bytes, Rank.PUBLISHED, ino, tenant=tenant)


def stored(heat: Heat) -> list[int]:
    """Return what each slot has, after comparing it with the rows."""
    columns = heat.columns()
    owners = columns.owners
    assert owners is not None
    slots = np.pad(owners.slot, (0, len(columns.ino) - len(owners.slot)))
    used = columns.ino != 0
    sums = np.bincount(slots[used], columns.allocated_bytes[used], len(owners.weight))
    assert (owners.stored_bytes == sums).all()
    return [int(each) for each in np.trim_zeros(owners.stored_bytes, "b")]


def test_one_tenant_needs_no_rows(heat: Heat) -> None:
    store(heat, ALICE, *range(20, 40))
    heat.drop(InodeNo(20))
    assert heat.columns().owners is None


def test_a_second_one_has_a_slot_beside_the_first(heat: Heat) -> None:
    store(heat, ALICE, *range(20, 40))
    store(heat, BOB, 50)
    assert stored(heat) == [20 * MIB, MIB]
    store(heat, BOB, *range(100, 2000))  # more rows than there were
    store(heat, ALICE, *range(2000, 2010))
    assert stored(heat) == [30 * MIB, 1901 * MIB]


def test_a_block_may_get_another_tenant_and_size_and_go(heat: Heat) -> None:
    store(heat, ALICE, 20, 21, 22)
    store(heat, BOB, 21, size_bytes=5 * MIB)
    store(heat, BOB, 30)
    assert stored(heat) == [2 * MIB, 6 * MIB]
    heat.drop(InodeNo(21))
    heat.evicted(InodeNo(20))
    assert stored(heat) == [MIB, MIB]
    owners = heat.columns().owners
    assert owners is not None
    assert list(owners.gone_bytes[:2]) == [MIB, 5 * MIB]
    assert list(owners.gone_then_bytes[:2]) == [MIB, 5 * MIB]
    heat.drop(InodeNo(30))
    assert owners.gone_bytes[1] == 6 * MIB, "the present"
    assert owners.gone_then_bytes[1] == 5 * MIB, "that of before"


def test_nobody_has_a_share_before_all_tenants_are_told(tmp_path: Path) -> None:
    """HEAT does not have them: a block that no scan has found yet would count for the wrong one."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    made = opened(fd)
    store(made, ALICE, 20)
    store(made, BOB, 21)
    assert made.columns().owners is None
    made.know_tenants()
    assert stored(made) == [MIB, MIB]
    os.close(fd)


def test_whose_last_use_is_long_ago_is_told_by_the_marks(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    made = opened(fd, idle_s=3600)
    made.know_tenants()
    store(made, ALICE, 20)
    store(made, BOB, 21)
    made.mark(NOW_S * SECOND_NS)
    assert idle_stamp(made) == 0, "it is not known for so long"
    made.run_due(1.0)
    store(made, BOB, 22)
    before = made.touched(InodeNo(21)), made.touched(InodeNo(22))
    made.mark((NOW_S + 3700) * SECOND_NS)
    assert before[0] < idle_stamp(made) <= before[1]
    os.close(fd)


def idle_stamp(heat: Heat) -> int:
    owners = heat.columns().owners
    assert owners is not None
    return owners.idle_stamp


def test_tenants_beyond_the_slots_share_one_and_get_those_that_are_free() -> None:
    made = HeatTenants(ALICE, 0, Entitlements({}))
    for number in range(1, SLOTS_MAX + 5):
        made.enter(number, TenantId(number), 10, 2 * SLOTS_MAX)
    owners = made.columns(0)
    assert slot(owners, SLOTS_MAX + 4) == slot(owners, SLOTS_MAX + 3) == SLOTS_MAX - 1
    assert owners.stored_bytes[SLOTS_MAX - 1] == 50
    assert owners.stored_bytes.sum() == 10 * (SLOTS_MAX + 4)
    made.drop(7, 10)
    made.enter(7, TenantId(9999), 30, 2 * SLOTS_MAX)
    assert slot(made.columns(0), 7) not in (0, SLOTS_MAX - 1)
    assert made.columns(0).stored_bytes[slot(made.columns(0), 7)] == 30


def slot(owners: Owners, row: int) -> int:
    return int(owners.slot[row])


TENANTS: Final = st.sampled_from([ALICE, BOB, CAROL, None])


@given(st.lists(st.tuples(st.integers(20, 30), TENANTS, st.integers(0, 9))))
def test_sums_agree_with_the_rows_whatever_comes_and_goes(
    tmp_path_factory: pytest.TempPathFactory, course: list[tuple[int, TenantId | None, int]]
) -> None:
    fd = os.open(tmp_path_factory.getbasetemp(), os.O_RDONLY | os.O_DIRECTORY)
    heat = opened(fd)
    heat.know_tenants()
    for ino, tenant, size_bytes in course:
        if tenant is None:
            heat.drop(InodeNo(ino))
        else:
            store(heat, tenant, ino, size_bytes=size_bytes)
        if heat.columns().owners is not None:
            assert sum(stored(heat)) == sum(heat.held_bytes)
    os.close(fd)


def shares(heat: Heat) -> list[int]:
    """Return what counts of each slot."""
    owners = heat.columns().owners
    assert owners is not None
    return [int(each) // MIB for each in owners.stored_bytes[:3]]


def test_a_block_that_another_keeps_does_not_count_for_its_tenant(heat: Heat) -> None:
    """Its own reads change nothing, nor do blocks that are gone."""
    store(heat, ALICE, 20, 21, 22)
    store(heat, BOB, 50, 51)
    heat.lend({InodeNo(20): {BOB}, InodeNo(21): {ALICE, CAROL}, InodeNo(22): {ALICE}})
    assert shares(heat) == [1, 2, 0]
    heat.lend({InodeNo(21): {BOB}, InodeNo(50): {BOB}, InodeNo(99): {BOB}})
    assert shares(heat) == [2, 2, 0]
    heat.lend({})
    assert shares(heat) == [3, 2, 0]


def test_a_directorys_blocks_are_its_own_whoever_reads_them(heat: Heat) -> None:
    store(heat, tenant_of_directory(InodeNo(7)), 20, 21)
    store(heat, BOB, 50)
    heat.lend({InodeNo(20): {BOB}, InodeNo(50): {ALICE}})
    assert shares(heat) == [2, 0, 0]


def test_what_is_lent_and_goes_leaves_the_sums_right(heat: Heat) -> None:
    """Between two looks, with the same slot."""
    store(heat, ALICE, 20)
    store(heat, BOB, 50, 51)
    heat.lend({InodeNo(50): {ALICE}, InodeNo(51): {ALICE}})
    heat.drop(InodeNo(50))
    assert shares(heat) == [1, -1, 0]
    heat.lend({})
    assert shares(heat) == [1, 1, 0]


def test_a_slot_all_of_which_is_lent_is_not_free(heat: Heat) -> None:
    store(heat, ALICE, 20)
    store(heat, BOB, 50)
    heat.lend({InodeNo(50): {ALICE}})
    for number in range(SLOTS_MAX):
        store(heat, TenantId(5000 + number), 100 + number)
    heat.lend({})
    slot = heat.slot_of(BOB)
    assert slot is not None
    assert heat.slot_of(BOB) not in {heat.slot_of(TenantId(5000 + n)) for n in range(SLOTS_MAX)}
