"""Demand: sizes by directory, counts by rate, never beyond the limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.headroom import FORGET_S, LARGEST_OF, PEAK_WINDOW_S, SIZES_MAX, SizeForecast
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, InodeNo

MIB = 1 << 20
AMPLE = {"limit_bytes": 1 << 40, "limit_extents": 1 << 20}


def burst(
    demand: SizeForecast, size_bytes: int, creates: int, rate: float, start_s: float
) -> float:
    """Note *creates* creates at *rate* a second; return the time of the last."""
    for number in range(creates):
        demand.note_created(size_bytes, start_s + number / rate)
    return start_s + (creates - 1) / rate


def test_a_directory_expects_the_size_it_published_last() -> None:
    demand = SizeForecast(8)
    demand.note_published(InodeNo(20), 4 * MIB, 0.0)
    demand.note_published(InodeNo(21), 100, 0.0)
    demand.note_published(InodeNo(20), 2 * MIB, 0.0)
    assert demand.expected_bytes(InodeNo(20)) == 2 * MIB
    assert demand.expected_bytes(InodeNo(21)) == 100


def test_an_unknown_directory_inherits_a_size_that_recent_publishes_agree_on() -> None:
    demand = SizeForecast(8)
    assert demand.expected_bytes(InodeNo(99)) == 0
    demand.note_published(InodeNo(20), 4 * MIB, 0.0)
    assert demand.expected_bytes(InodeNo(99)) == 4 * MIB
    demand.note_published(InodeNo(20), 5 * MIB, 0.0)
    assert demand.expected_bytes(InodeNo(99)) == 0
    for _ in range(4):
        demand.note_published(InodeNo(20), 6 * MIB, 0.0)
    assert demand.expected_bytes(InodeNo(99)) == 6 * MIB


def test_what_a_new_directory_inherits_is_believed_once_others_kept_to_it() -> None:
    """Four in a row: a pool spreads its blocks over directories, or has several kinds of them."""
    demand = SizeForecast(16)
    new = InodeNo(99)
    for ino in range(20, 25):
        assert not demand.foretells(new)
        demand.note_published(InodeNo(ino), 4 * MIB, 0.0)
        assert demand.foretells(InodeNo(ino)), "of its own blocks"
    assert demand.foretells(new)
    demand.note_published(new, 64 * MIB, 0.0)
    assert demand.foretells(new)
    assert not demand.foretells(InodeNo(98))


def test_the_largest_size_is_that_of_the_last_publishes_and_of_those_before() -> None:
    """One to two times LARGEST_OF of them: a large block is not forgotten by one publish."""
    demand, directory = SizeForecast(2), InodeNo(20)
    demand.note_published(directory, 9 * MIB, 0.0)
    for _ in range(2 * LARGEST_OF - 1):
        demand.note_published(directory, MIB, 0.0)
        assert demand.recent_bytes(directory)[1] == 9 * MIB
    demand.note_published(directory, MIB, 0.0)
    assert demand.recent_bytes(directory)[1] == MIB
    assert demand.recent_bytes(InodeNo(21))[1] == demand.expected_bytes(InodeNo(21)) == MIB


def test_only_so_many_directories_are_remembered_and_the_oldest_goes() -> None:
    demand = SizeForecast(2)
    for ino, size_bytes in ((20, 1), (21, 2), (20, 3), (22, 4)):
        demand.note_published(InodeNo(ino), size_bytes, 0.0)
    assert demand.expected_bytes(InodeNo(20)) == 3
    assert demand.expected_bytes(InodeNo(22)) == 4
    assert demand.expected_bytes(InodeNo(21)) == 0


def test_a_size_published_once_keeps_one_extent_ready_for_a_minute() -> None:
    demand = SizeForecast(8)
    demand.note_published(ROOT_INODE, 3 * MIB - 5, 10.0)
    assert demand.wanted(10.0, **AMPLE) == {3 * MIB: 1}
    assert demand.wanted(10.0 + FORGET_S, **AMPLE) == {3 * MIB: 1}
    assert demand.wanted(10.1 + FORGET_S, **AMPLE) == {}


def test_sizes_are_counted_by_whole_pages() -> None:
    demand = SizeForecast(8)
    demand.note_created(1, 0.0)
    demand.note_created(PAGE_BYTES, 0.0)
    demand.note_created(0, 0.0)
    assert set(demand.wanted(0.0, **AMPLE)) == {0, PAGE_BYTES}


@pytest.mark.parametrize("rate", [10.0, 100.0, 1000.0])
def test_the_count_follows_the_rate_of_creates(rate: float) -> None:
    demand = SizeForecast(8)
    end_s = burst(demand, MIB, int(rate * 5), rate, 0.0)
    count = demand.wanted(end_s, **AMPLE)[MIB]
    assert 0.4 * rate <= count <= 0.6 * rate + 1


def test_a_burst_is_remembered_for_the_next_one_and_then_fades() -> None:
    demand = SizeForecast(8)
    end_s = burst(demand, MIB, 500, 100.0, 0.0)
    at_once = demand.wanted(end_s, **AMPLE)[MIB]
    after_5_s = demand.wanted(end_s + 5.0, **AMPLE)[MIB]
    after_50_s = demand.wanted(end_s + 50.0, **AMPLE)[MIB]
    assert at_once > after_5_s > at_once // 2
    assert after_50_s <= at_once * 2.72 ** (-50.0 / PEAK_WINDOW_S) + 1


def test_a_clock_that_steps_back_changes_nothing() -> None:
    demand = SizeForecast(8)
    end_s = burst(demand, MIB, 100, 100.0, 50.0)
    before = demand.wanted(end_s, **AMPLE)
    assert demand.wanted(end_s - 10.0, **AMPLE) == before


def test_under_tight_limits_every_size_keeps_one_before_any_keeps_two() -> None:
    demand = SizeForecast(8)
    end_s = burst(demand, 4 * MIB, 1000, 200.0, 0.0)
    demand.note_created(MIB, end_s)
    wanted = demand.wanted(end_s, limit_bytes=41 * MIB, limit_extents=1000)
    assert wanted == {4 * MIB: 10, MIB: 1}
    assert demand.wanted(end_s, limit_bytes=1 << 40, limit_extents=2) == {4 * MIB: 1, MIB: 1}


def test_the_size_seen_last_comes_first_when_not_all_fit() -> None:
    demand = SizeForecast(8)
    for number, size_bytes in enumerate((MIB, 2 * MIB, 3 * MIB)):
        demand.note_published(ROOT_INODE, size_bytes, float(number))
    assert demand.wanted(3.0, limit_bytes=3 * MIB, limit_extents=9) == {3 * MIB: 1}
    assert demand.wanted(3.0, limit_bytes=9 * MIB, limit_extents=1) == {3 * MIB: 1}
    assert demand.wanted(3.0, limit_bytes=0, limit_extents=9) == {}


def test_a_tree_of_many_sizes_is_bounded() -> None:
    demand = SizeForecast(8)
    for number in range(10 * SIZES_MAX):
        demand.note_created(number * PAGE_BYTES, 0.0)
    wanted = demand.wanted(0.0, **AMPLE)
    assert set(wanted) == {number * PAGE_BYTES for number in range(9 * SIZES_MAX, 10 * SIZES_MAX)}


@given(
    creates=st.lists(st.tuples(st.integers(0, 64 * MIB), st.floats(0, 2)), max_size=60),
    limit_bytes=st.integers(0, 256 * MIB),
    limit_extents=st.integers(0, 40),
)
def test_the_limits_always_hold(
    creates: list[tuple[int, float]], limit_bytes: int, limit_extents: int
) -> None:
    demand = SizeForecast(4)
    now_s = 0.0
    for size_bytes, passed_s in creates:
        now_s += passed_s
        demand.note_created(size_bytes, now_s)
    wanted = demand.wanted(now_s, limit_bytes=limit_bytes, limit_extents=limit_extents)
    assert sum(size * count for size, count in wanted.items()) <= limit_bytes
    assert sum(wanted.values()) <= limit_extents
    assert all(count >= 1 and size % PAGE_BYTES == 0 for size, count in wanted.items())
