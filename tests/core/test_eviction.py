"""Victims: the coldest of the lowest rank, tails before heads, no more than is wanted."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.eviction_policy import (
    BURST_BITS,
    EVICTABLE,
    Adaptive,
    Arc,
    Columns,
    EvictionPolicy,
    Lru,
    Rank,
    Retention,
    policy_named,
)

MIB: Final = 1 << 20
ALL: Final = 1 << 62
#: A plan names others alone, if there are any.
UNHINTED: Final = [rank for rank in Rank if rank is not Rank.RETAINED]


class Row:
    """One block, as a test writes it down."""

    def __init__(
        self,
        ino: int,
        burst: int,
        touches: int = 1,
        size_bytes: int = MIB,
        rank: Rank = Rank.PUBLISHED,
    ) -> None:
        self.ino, self.burst, self.touches = ino, burst, touches
        self.size_bytes, self.rank = size_bytes, rank


def columns(rows: Sequence[Row]) -> Columns:
    """Return *rows* as a policy sees them, with unused ones between."""
    made = Columns(
        np.zeros(2 * len(rows) + 1, np.uint64),
        np.zeros(2 * len(rows) + 1, np.uint64),
        np.zeros(2 * len(rows) + 1, np.uint16),
        np.full(2 * len(rows) + 1, MIB, np.uint64),
        np.full(2 * len(rows) + 1, Rank.PUBLISHED, np.uint8),
    )
    for number, row in enumerate(rows):
        at = 2 * number + 1
        made.ino[at], made.touches[at], made.rank[at] = row.ino, row.touches, row.rank
        made.touched[at] = row.burst << BURST_BITS | number
        made.allocated_bytes[at] = row.size_bytes
    return made


def victims(
    policy: EvictionPolicy,
    rows: Sequence[Row],
    *,
    bytes_wanted: int = ALL,
    count_max: int = 1 << 20,
    ranks: Sequence[Rank] = EVICTABLE,
    but_not: Sequence[int] = (),
) -> list[int]:
    """Return whom *policy* names."""
    found = policy.victims(
        columns(rows),
        bytes_wanted=bytes_wanted,
        count_max=count_max,
        ranks=ranks,
        but_not=np.array(but_not, np.uint64),
    )
    return [int(ino) for ino in found]


def test_the_longest_unused_goes_first() -> None:
    rows = [Row(20, burst=3), Row(21, burst=1), Row(22, burst=2)]
    assert victims(Lru(), rows) == [21, 22, 20]


def beside(rows: Sequence[Row], *, blocks: int) -> list[Row]:
    """Return *rows* in a pool of so many blocks, of which the others stay."""
    return [*rows, *(Row(1000 + n, burst=0, rank=Rank.NEVER) for n in range(blocks - len(rows)))]


def test_of_one_burst_the_tail_goes_before_the_head() -> None:
    rows = [Row(20, burst=2), Row(21, burst=2), Row(22, burst=2), Row(30, burst=1)]
    assert victims(Lru(), beside(rows, blocks=192)) == [30, 22, 21, 20]


def test_of_a_burst_longer_than_a_small_part_of_the_pool_the_oldest_goes() -> None:
    rows = [Row(20 + number, burst=1) for number in range(6)]
    assert victims(Lru(), beside(rows, blocks=191)) == [21, 20, 23, 22, 25, 24]
    assert victims(Lru(), beside(rows, blocks=127)) == [20, 21, 22, 23, 24, 25]
    assert victims(Lru(), list(reversed(rows))) == [25, 24, 23, 22, 21, 20], "by their touches"


@pytest.mark.parametrize("policy", [Lru(), Arc()], ids=lambda policy: policy.name)
def test_a_lower_rank_goes_first_however_warm_it_is(policy: EvictionPolicy) -> None:
    rows = [
        Row(20, burst=9, rank=Rank.FIRST),
        Row(21, burst=2),
        Row(22, burst=1, rank=Rank.SMALL),
        Row(23, burst=0, rank=Rank.ORPHAN_SLAB),
        Row(24, burst=0, rank=Rank.NEVER),
    ]
    assert victims(policy, rows) == [20, 21, 22, 23]
    assert victims(policy, rows, ranks=[Rank.SMALL]) == [22]
    assert victims(policy, rows, ranks=[]) == []


@pytest.mark.parametrize("policy", [Lru(), Arc()], ids=lambda policy: policy.name)
def test_no_more_than_is_wanted(policy: EvictionPolicy) -> None:
    rows = [Row(20 + age, burst=age) for age in range(10)]
    assert victims(policy, rows, bytes_wanted=0) == []
    assert victims(policy, rows, bytes_wanted=1) == [20]
    assert victims(policy, rows, bytes_wanted=3 * MIB) == [20, 21, 22]
    assert victims(policy, rows, bytes_wanted=3 * MIB + 1) == [20, 21, 22, 23]
    assert victims(policy, rows, count_max=2) == [20, 21]
    assert len(victims(policy, rows, bytes_wanted=ALL)) == 10


def test_what_holds_no_space_stays() -> None:
    assert victims(Lru(), [Row(20, burst=1, size_bytes=0), Row(21, burst=2)]) == [21]


@pytest.mark.parametrize("policy", [Lru(), Arc()], ids=lambda policy: policy.name)
def test_who_is_named_already_is_left_out(policy: EvictionPolicy) -> None:
    rows = [Row(20 + age, burst=age) for age in range(10)]
    assert victims(policy, rows, bytes_wanted=2 * MIB, but_not=[20, 21, 99]) == [22, 23]


@pytest.mark.parametrize("policy", [Lru(), Arc()], ids=lambda policy: policy.name)
def test_no_rows_no_victims(policy: EvictionPolicy) -> None:
    assert victims(policy, []) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.integers(0, 4),
            st.sampled_from(UNHINTED),
        ),
        max_size=60,
    ),
    st.integers(0, 80),
    st.integers(0, 40),
)
def test_lru_is_what_sorting_everything_gives(
    drawn: list[tuple[int, int, Rank]], wanted: int, count_max: int
) -> None:
    rows = [
        Row(20 + number, burst, size_bytes=size, rank=rank)
        for number, (burst, size, rank) in enumerate(drawn)
    ]
    candidates = [row for row in rows if row.rank in EVICTABLE and row.size_bytes]
    expected: list[int] = []
    for row in sorted(candidates, key=lambda row: (row.rank, row.burst, row.ino)):
        if wanted <= 0 or len(expected) == count_max:
            break
        expected.append(row.ino)
        wanted -= row.size_bytes
    asked = sum(row.size_bytes for row in rows if row.ino in expected) + max(0, wanted)
    assert victims(Lru(), rows, bytes_wanted=asked, count_max=count_max) == expected


@pytest.mark.parametrize("name", ["lru", "arc"])
@pytest.mark.parametrize("spread", [1, 50, 100_000])
def test_a_choice_among_many_is_that_of_a_full_sort(name: str, spread: int) -> None:
    """More rows than the sample: also when many are of one burst, or sizes mislead the estimate."""
    count = 40_000
    draw = np.random.default_rng(spread)
    rows = Columns(
        draw.permutation(np.arange(16, 16 + count).astype(np.uint64)),
        draw.integers(0, spread, count).astype(np.uint64) << np.uint64(BURST_BITS),
        np.ones(count, np.uint16),
        np.where(draw.random(count) < 0.01, 1000 * MIB, 4096).astype(np.uint64),
        np.full(count, Rank.PUBLISHED, np.uint8),
    )
    order = np.lexsort((~rows.ino, rows.touched))
    for wanted in (4096, 20 * MIB, 5000 * MIB, ALL):
        found = policy_named(name).victims(rows, bytes_wanted=wanted, count_max=30_000)
        ends = np.cumsum(rows.allocated_bytes[order])
        enough = min(int(np.searchsorted(ends, np.uint64(wanted))) + 1, 30_000)
        assert found.tolist() == rows.ino[order[:enough]].tolist()


# ---- ARC ----


def test_arc_takes_blocks_used_once_before_those_used_again() -> None:
    rows = [Row(20, burst=1, touches=2), Row(21, burst=2), Row(22, burst=3)]
    assert victims(Arc(), rows) == [21, 22, 20]
    assert victims(Lru(), rows) == [20, 21, 22]


def taught(rows: Sequence[Row], *, touches: int, times: int) -> Arc:
    """Return a policy that evicted blocks of so many *touches*, which came back."""
    policy = Arc()
    victims(policy, rows, bytes_wanted=1)  # it has seen how many blocks there are
    for name in range(times):
        policy.evicted(name, MIB, touches)
        assert policy.admitted(name, MIB)
    return policy


def test_arc_learns_from_what_comes_back() -> None:
    rows = [Row(20 + age, burst=age, touches=1 + age % 2) for age in range(10)]
    for_once = taught(rows, touches=1, times=3)
    assert for_once.once_bytes == 3 * MIB
    # Five used once, three of them worth their room: two go, then those used again.
    assert victims(for_once, rows, bytes_wanted=3 * MIB) == [20, 22, 21]
    for name in range(3):
        for_once.evicted(name, MIB, 2)
        assert for_once.admitted(name, MIB)
    assert for_once.once_bytes == 0
    assert victims(for_once, rows, bytes_wanted=3 * MIB) == [20, 22, 24]


def test_arc_takes_of_either_kind_when_the_other_is_used_up() -> None:
    rows = [Row(20 + age, burst=age, touches=1 + age % 2) for age in range(10)]
    policy = taught(rows, touches=1, times=100)
    assert policy.once_bytes == 10 * MIB  # never more than there is
    assert victims(policy, rows) == [21, 23, 25, 27, 29, 20, 22, 24, 26, 28]


def test_arc_knows_an_evicted_name_once_and_not_for_ever() -> None:
    rows = [Row(20 + age, burst=age, touches=1 + age % 2) for age in range(10)]
    policy = Arc()
    victims(policy, rows)
    policy.evicted(7, MIB, 1)
    assert policy.admitted(7, MIB)
    assert not policy.admitted(7, MIB)
    policy.evicted(7, MIB, 1)
    for name in range(1000, 1005):
        policy.evicted(name, MIB, 1)
    assert not policy.admitted(7, MIB)  # as many went since as there are of the other kind
    assert not policy.admitted(8, MIB)


# ---- adaptive ----


def flooded(policy: Adaptive, *, floods: int) -> None:
    """Let blocks 0 to 9 be stored again and again, with *floods* other blocks in between."""
    fresh = 1000
    for _ in range(60):
        for name in [*range(10), *range(fresh, fresh + floods)]:
            if not policy.admitted(name, MIB):
                policy.evicted(name, MIB, 1)
        fresh += floods


@pytest.mark.parametrize(("floods", "once_first"), [(400, True), (40, False)])
def test_adaptive_learns_which_order_finds_more(floods: int, once_first: bool) -> None:
    """A flood of more than the pool's 100 blocks passes; one that fits leaves all to their age."""
    rows = [Row(20 + age, burst=age, touches=1 + (age < 50)) for age in range(100)]
    policy = Adaptive()
    assert victims(policy, rows)[:3] == [20, 21, 22]  # by age, until it knows better
    flooded(policy, floods=floods)
    assert policy.once_first is once_first
    named = victims(policy, rows)
    assert named[:3] == ([70, 71, 72] if once_first else [20, 21, 22])


def test_adaptive_names_few_blocks_used_again_at_a_time() -> None:
    """What is stored while a plan lasts goes before them."""
    rows = [Row(20 + age, burst=age, touches=1 + (age < 90)) for age in range(100)]
    policy = Adaptive()
    victims(policy, rows)
    flooded(policy, floods=400)
    assert victims(policy, rows) == [*range(110, 120), *range(20, 74)]
    assert victims(policy, rows, but_not=range(110, 120)) == list(range(20, 84))


def test_adaptive_knows_a_name_that_was_evicted_lately() -> None:
    rows = [Row(20 + age, burst=age) for age in range(10)]
    policy = Adaptive()
    victims(policy, rows)
    policy.evicted(7, MIB, 1)
    for name in range(1000, 1030):
        policy.evicted(name, MIB, 1)
    assert policy.admitted(7, MIB)
    assert not policy.admitted(7, MIB)
    policy.evicted(7, MIB, 1)
    for name in range(1000, 1040):
        policy.evicted(name, MIB, 1)
    assert not policy.admitted(7, MIB)  # four times as many went since as there are


def test_lru_remembers_nothing() -> None:
    policy = Lru()
    policy.evicted(7, MIB, 1)
    assert not policy.admitted(7, MIB)


@pytest.mark.parametrize("name", ["lru", "arc", "adaptive"])
def test_what_hints_retain_goes_last_by_priority_until_it_ends(name: str) -> None:
    """Rows beyond those of the hints have priority 0."""
    made = columns([Row(20 + n, burst=n, rank=Rank.RETAINED) for n in range(5)])
    priority, until_s = np.zeros(8, np.uint8), np.full(8, 2000, np.uint32)
    priority[[1, 3, 5, 7]] = [90, 5, 90, 40]  # of 20, 21, 22, 23
    until_s[7] = 1000

    def order(now_s: int, count_max: int = 99) -> list[int]:
        hinted = made._replace(retention=Retention(priority, until_s, now_s))
        found = policy_named(name).victims(hinted, bytes_wanted=ALL, count_max=count_max)
        return [int(ino) for ino in found]

    assert order(999) == [24, 21, 23, 20, 22]
    assert order(999, count_max=2) == [24, 21]
    assert order(1000) == [23]
    assert order(2000) == [20, 21, 22, 23]
    assert made.rank[1] == Rank.RETAINED  # a scan changes no row


def test_a_plan_names_what_hints_retain_only_if_little_else_may_go() -> None:
    """What is stored after the plan goes first; but a large pool is not scanned for each store."""
    retained = [Row(20 + n, burst=n, rank=Rank.RETAINED) for n in range(100)]
    assert victims(Lru(), [*retained, Row(5, burst=200)]) == [5]
    assert victims(Lru(), [*retained, Row(5, burst=200, rank=Rank.ORPHAN_SLAB)]) == [5]
    assert victims(Lru(), retained) == [row.ino for row in retained]
    large = beside([*retained, Row(5, burst=200)], blocks=1024)
    assert victims(Lru(), large) == [5, *(20 + n for n in range(64))]
    many = beside([*retained, *(Row(500 + n, burst=0) for n in range(64))], blocks=1 << 16)
    assert len(victims(Lru(), many)) == 64
