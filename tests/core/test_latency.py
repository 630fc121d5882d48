"""Histograms of durations: buckets, quantiles, and the last minutes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.latency import RECENT_S, Latency, RecentLatency, quantile_s, upper_s

MS: int = 1_000_000
DURATIONS = st.integers(0, 1 << 40)


@given(st.lists(DURATIONS, min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_within_its_bucket(durations: list[int], share: float) -> None:
    latency = Latency()
    for duration_ns in durations:
        latency.add(duration_ns)
    told = quantile_s(latency.counts, share)
    rank = next(n for n in range(1, len(durations) + 1) if n >= share * len(durations))
    exact_s = sorted(durations)[rank - 1] / 1e9
    assert told is not None
    longest_s = upper_s(24)
    if exact_s < longest_s:
        assert exact_s / 2 - 5e-6 <= told <= 2 * exact_s + 5e-6
    else:
        assert told == longest_s


@given(st.lists(DURATIONS, max_size=50))
def test_buckets_count_what_is_no_longer(durations: list[int]) -> None:
    latency = Latency()
    for duration_ns in durations:
        latency.add(duration_ns)
    told = latency.shown()
    assert told["count"] == len(durations)
    assert told["total_s"] == pytest.approx(sum(durations) / 1e9, abs=1e-6)
    for end_s, count in told["buckets"]:
        assert count == sum(duration_ns / 1e9 < end_s for duration_ns in durations)


def test_of_nothing_there_is_no_quantile() -> None:
    told = Latency().shown()
    assert (told["count"], told["p50_s"], told["p99_s"]) == (0, None, None)


def test_a_clock_that_was_set_back_counts_nothing() -> None:
    latency = Latency()
    latency.add(-1)
    assert latency.shown()["count"] == 0


def test_the_last_minutes_forget_what_was_before() -> None:
    latency = RecentLatency()
    now_s = 1000.0
    latency.run_due(now_s)
    latency.add(4000 * MS)
    assert latency.shown()["recent"]["p99_s"] > 2
    for _ in range(2):
        now_s += RECENT_S
        latency.run_due(now_s)
    latency.add(1 * MS)
    told = latency.shown()
    assert told["recent"]["count"] == 1
    assert told["recent"]["p99_s"] < 0.003
    assert told["count"] == 2
    latency.run_due(now_s + 1)
    assert latency.shown()["recent"]["count"] == 1
