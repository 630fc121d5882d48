"""Whose block goes next: of whom has most for its weight; alone, whatever the policy says."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.block_owners import Owners
from kvfs.core.eviction_policy import (
    BURST_BITS,
    EVICTABLE,
    NOTHING,
    Columns,
    Rank,
    Retention,
    policy_named,
)
from kvfs.core.fair_shares import TENANTS_MAX, InOrder, Plan, plan_of
from kvfs.core.types import InodeNo

MIB: Final = 1 << 20
ALL: Final = 1 << 62
SLOTS: Final = 64
ALICE, BOB, CAROL = 0, 1, 2
FIRST_INO: Final = 20
#: Later than all blocks.
NOW: Final = 1 << 60


class Blocks:
    """Blocks of some tenants, as the heat has them: what is stored and what went is at present."""

    def __init__(self, weights: Sequence[float] = (), idle_burst: int = 0) -> None:
        self.rows: list[tuple[int, int, int, Rank, int]] = []
        self.stored, self.gone = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64)
        self.weight = np.ones(SLOTS)
        self.weight[: len(weights)] = weights
        self.idle_burst = idle_burst
        self.left = set[int]()

    def add(
        self,
        slot: int,
        *bursts: int,
        size_bytes: int = MIB,
        rank: Rank = Rank.PUBLISHED,
        touches: int = 1,
    ) -> list[int]:
        """Let *slot* have a block of each of *bursts*; return their numbers."""
        begin = FIRST_INO + len(self.rows)
        for burst in bursts:
            self.rows.append((slot, burst, size_bytes, rank, touches))
            self.stored[slot] += size_bytes
        inos = list(range(begin, FIRST_INO + len(self.rows)))
        self.left.update(inos)
        return inos

    def store_meanwhile(self, slot: int, size_bytes: int) -> None:
        """Let *slot* store what is in no plan yet."""
        self.stored[slot] += size_bytes

    def evict(self, ino: int) -> None:
        slot, size_bytes = self.slot(ino), self.allocated_bytes(InodeNo(ino))
        self.left.discard(ino)
        self.stored[slot] -= size_bytes
        self.gone[slot] += size_bytes

    def slot(self, ino: int) -> int:
        return self.rows[ino - FIRST_INO][0]

    def touched(self, ino: InodeNo) -> int:
        return self.rows[ino - FIRST_INO][1] << BURST_BITS

    def allocated_bytes(self, ino: InodeNo) -> int:
        return self.rows[ino - FIRST_INO][2]

    def ratio(self, slot: int) -> float:
        return float(self.stored[slot] / self.weight[slot])

    def columns(self) -> Columns:
        there = [ino in self.left for ino in range(FIRST_INO, FIRST_INO + len(self.rows))]
        slots, bursts, sizes, ranks, touches = zip(*self.rows, strict=True)
        inos = np.arange(FIRST_INO, FIRST_INO + len(self.rows)) * np.array(there)
        return Columns(
            inos.astype(np.uint64),
            np.array(bursts, np.uint64) << np.uint64(BURST_BITS),
            np.array(touches, np.uint16),
            np.array(sizes, np.uint64),
            np.array(ranks, np.uint8),
            None,
            Owners(
                np.array(slots, np.uint16),
                self.stored,
                self.gone,
                self.weight,
                self.idle_burst << BURST_BITS,
                self.stored.copy(),
                self.gone.copy(),
            ),
        )

    def plan(
        self, policy: str = "lru", *, count_max: int = 1 << 20, slack_bytes: int = ALL
    ) -> Plan:
        return plan_of(
            policy_named(policy),
            self.columns(),
            bytes_wanted=ALL,
            count_max=count_max,
            but_not=NOTHING,
            slack_bytes=slack_bytes,
        )

    def evict_next(self, plan: Plan, count: int = 1) -> list[int]:
        """Evict so many, each in a batch of its own; return which."""
        found: list[int] = []
        while len(found) < count:
            plan.begin_batch()
            ino = plan.next(self, NOW)
            if ino is None:
                break
            self.evict(ino)
            found.append(int(ino))
        return found


def drain(plan: Plan, known: Blocks) -> list[int]:
    """Take all, in one batch."""
    plan.begin_batch()
    return [int(ino) for ino in iter(lambda: plan.next(known, NOW), None)]


def drawn(blocks: Iterable[tuple[int, int, int, Rank]], weights: Sequence[float]) -> Blocks:
    made = Blocks(weights)
    for slot, burst, pages, rank in blocks:
        made.add(slot, burst, size_bytes=pages * 4096, rank=rank)
    return made


BLOCKS: Final = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 8), st.sampled_from(list(Rank))),
    min_size=1,
    max_size=60,
)
WEIGHTS: Final = st.lists(st.sampled_from([1.0, 0.5, 2.0, 3.0, 50.0]), min_size=4, max_size=4)


@given(BLOCKS, WEIGHTS, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=9))
def test_nobody_gives_way_who_has_less_for_its_weight_than_another(
    rows: list[tuple[int, int, int, Rank]],
    weights: list[float],
    stores: list[tuple[int, int]],
) -> None:
    """Also of what is stored while the plan lasts; and all that may go is named."""
    made = drawn(rows, weights)
    may_go = {ino for ino in made.left if made.rows[ino - FIRST_INO][3] in EVICTABLE}
    plan = made.plan()
    while found := made.evict_next(plan) or made.evict_next(plan := made.plan()):
        (ino,) = found
        if made.rows[ino - FIRST_INO][3] is not Rank.FIRST:
            size_bytes = made.allocated_bytes(InodeNo(ino))
            had = (made.stored[made.slot(ino)] + size_bytes) / made.weight[made.slot(ino)]
            others = {made.slot(other) for other in may_go & made.left if other != ino}
            assert all(had >= made.ratio(slot) for slot in others - {made.slot(ino)})
        may_go.discard(ino)
        if stores:
            slot, pages = stores.pop()
            made.store_meanwhile(slot, pages * 4096)
    assert not may_go


@given(BLOCKS, st.sampled_from(["lru", "arc", "adaptive"]), st.integers(1, 70))
def test_one_tenant_alone_has_what_its_policy_says(
    rows: list[tuple[int, int, int, Rank]], policy: str, count_max: int
) -> None:
    """Row by row; beside one whose few blocks stay, too, unless the policy counts what it has."""
    alone = drawn([(ALICE, *rest) for _, *rest in rows], [])
    whole = policy_named(policy).victims(
        alone.columns()._replace(owners=None), bytes_wanted=ALL, count_max=count_max
    )
    assert drain(alone.plan(policy, count_max=count_max), alone) == whole.tolist()
    alone.add(BOB, 1, rank=Rank.NEVER)
    if Rank.RETAINED not in {rank for *_, rank in rows}:
        beside = drain(alone.plan(policy), alone)
        assert beside == drain(InOrder(alone_order(alone, policy)), alone)


def alone_order(made: Blocks, policy: str) -> list[int]:
    columns = made.columns()._replace(owners=None)
    found = policy_named(policy).victims(columns, bytes_wanted=ALL, count_max=1 << 20)
    return [int(ino) for ino in found]


def test_garbage_goes_first_whose_ever_it_is() -> None:
    made = Blocks()
    made.add(ALICE, 1, 2, 3)
    garbage = made.add(BOB, 9, rank=Rank.FIRST)
    assert made.evict_next(made.plan()) == garbage


def test_small_and_retained_blocks_of_one_push_out_nobody_elses() -> None:
    made = Blocks()
    own = made.add(ALICE, 4, rank=Rank.SMALL) + made.add(ALICE, 1, 2, 3, rank=Rank.RETAINED)
    made.add(BOB, 1, 2)
    assert [made.evict_next(made.plan())[0] for _ in range(2)] == own[:2]


def test_what_hints_retain_goes_by_priority_within_a_tenant() -> None:
    made = Blocks()
    made.add(ALICE, 1, 2, 3, rank=Rank.RETAINED)
    made.add(BOB, 1)
    retention = Retention(np.array([9, 1, 5], np.uint8), np.full(3, 99, np.uint32), 1)
    plan = plan_of(
        policy_named("lru"),
        made.columns()._replace(retention=retention),
        bytes_wanted=ALL,
        count_max=9,
        but_not=NOTHING,
        slack_bytes=ALL,
    )
    assert made.evict_next(plan, 2) == [21, 22]


def test_a_tenant_below_its_share_keeps_all_of_a_flood() -> None:
    """The flood stores on while a plan lasts: it makes room for itself alone."""
    made = Blocks()
    cold = set(made.add(BOB, *([1] * 50)))
    made.add(ALICE, *range(10, 60))
    for burst in range(100, 300):
        (gone,) = made.evict_next(made.plan(slack_bytes=MIB))
        assert gone not in cold or made.stored[BOB] > made.stored[ALICE] - MIB
        made.add(ALICE, burst)
    assert len(cold & made.left) == 50


@pytest.mark.parametrize("weights", [(1, 1, 1), (50, 30, 20), (3, 1, 0.25)])
def test_each_has_what_its_weight_is_of_all_once_they_want_more(
    weights: tuple[float, float, float],
) -> None:
    made = Blocks(weights)
    made.add(ALICE, *range(300))
    for burst in range(300, 900):
        made.add(burst % 3, burst)
        assert made.evict_next(made.plan())
    shares = made.stored[:3] / made.stored.sum()
    assert shares == pytest.approx(np.array(weights) / sum(weights), abs=0.01)


def test_one_batch_is_shared_as_if_each_went_alone() -> None:
    """Nothing is freed before the whole batch is."""
    made = Blocks()
    made.add(ALICE, *range(10))
    made.add(BOB, *range(8))
    slots = [made.slot(ino) for ino in drain(made.plan(), made)]
    assert slots[:6] == [ALICE, ALICE, ALICE, BOB, ALICE, BOB]


def test_who_is_idle_has_no_share_and_goes_by_age_with_who_gives_way() -> None:
    made = Blocks(idle_burst=50)
    idle = made.add(CAROL, 10, 30)
    alice, bob = made.add(ALICE, 20, 90), made.add(BOB, 5, 92, 93)
    gone = made.evict_next(made.plan(), 5)
    assert gone == [bob[0], *idle, bob[1], alice[0]]


def test_what_is_lent_comes_back_as_it_is_stored() -> None:
    made = Blocks(idle_burst=50)
    made.add(ALICE, *range(100, 200))
    made.add(BOB, 10)
    made.evict_next(made.plan())
    assert made.stored[BOB] == 0
    for burst in range(200, 280):
        made.add(BOB, burst)
        made.evict_next(made.plan())
    assert made.stored[BOB] == made.stored[ALICE] == 50 * MIB


def test_a_plan_ends_when_one_that_it_does_not_name_stores_more_than_all() -> None:
    """That is if it freed something: else what may not go would hide what may."""
    made = Blocks()
    made.add(ALICE, *range(9))
    made.add(BOB, *range(9))
    plan = made.plan(slack_bytes=4 * MIB)
    made.store_meanwhile(CAROL, 20 * MIB)
    assert made.evict_next(plan) == [20]
    plan.begin_batch()
    assert plan.next(made, NOW) is None
    assert not plan
    assert made.evict_next(made.plan(slack_bytes=4 * MIB)) == [29]


def test_a_plan_ends_when_all_that_it_names_of_who_gives_way_has_gone() -> None:
    """There is more of it, and others have less for their weight."""
    made = Blocks()
    made.add(ALICE, *range(20))
    made.add(BOB, *range(4))
    plan = made.plan(count_max=3)
    assert made.evict_next(plan, 9) == [20, 21, 22]
    assert not plan
    assert made.evict_next(made.plan(count_max=3), 9) == [23, 24, 25]


def test_what_cannot_go_does_not_hide_the_blocks_of_others() -> None:
    """They were taken and stay: a unit, say, in use by another."""
    made = Blocks()
    refused = made.add(ALICE, *range(20))
    bob = made.add(BOB, *range(4))
    plan = made.plan(count_max=10)
    taken = drain(plan, made)
    assert taken == refused[:10] + bob


def test_a_victim_that_is_put_back_is_the_next() -> None:
    made = Blocks()
    made.add(ALICE, 1)
    made.add(BOB, 1, size_bytes=4096)
    plan = made.plan()
    for _ in range(3):
        plan.begin_batch()
        ino = plan.next(made, NOW)
        assert ino == 20
        plan.put_back(ino)
        assert plan
    plan.begin_batch()
    assert drain(plan, made) == [20, 21]


def test_what_was_used_since_is_passed_over() -> None:
    made = Blocks()
    made.add(ALICE, 1, 7, 3)
    made.add(BOB, 1)
    plan = made.plan()
    plan.begin_batch()
    found = [plan.next(made, 5 << BURST_BITS) for _ in range(4)]
    assert found == [20, 22, 23, None]


def test_a_crowd_of_tenants_is_planned_for_those_with_most() -> None:
    """The others have one queue, which is for the case that these have none left."""
    made = Blocks()
    for slot in range(3 * TENANTS_MAX):
        made.add(slot, *range(slot + 1))
    slots = [made.slot(ino) for ino in drain(made.plan(), made)]
    with_most = [slot for slot in slots if slot >= 2 * TENANTS_MAX]
    assert slots[: len(with_most)] == with_most
    assert len(slots) == len(made.left)


def test_one_outside_the_plan_that_has_more_ends_it() -> None:
    made = Blocks()
    for slot in range(TENANTS_MAX + 1):
        made.add(slot, *range(4))
    plan = made.plan(slack_bytes=MIB)
    gone = made.evict_next(plan, 999)
    assert not plan
    assert len(gone) == 2 * TENANTS_MAX
