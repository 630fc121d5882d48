"""Evicted names: found once, in bounded memory; what comes back is counted by age, by a sample."""

import random
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.evicted import AGES_S, DAY_S, EvictedNames, Return, TierBehind, words_of

HASHES: Final = st.integers(0, (1 << 32) - 1)
YEAR_S: Final = 365.0 * DAY_S
MIB: Final = 1 << 20


@given(name=HASHES, at_s=st.floats(0, YEAR_S), away_s=st.floats(0, YEAR_S))
def test_an_evicted_name_is_found_once(name: int, at_s: float, away_s: float) -> None:
    names = EvictedNames.of(16)
    names.remember(name, MIB, at_s)
    assert name in names
    found = names.pop(name, at_s + away_s)
    assert found is not None
    assert found.away_s == pytest.approx(away_s, abs=0.2)
    assert found.size_bytes == MIB
    assert name not in names
    assert names.pop(name, at_s + away_s) is None


@given(evicted=st.lists(HASHES), asked=HASHES)
def test_a_name_that_was_not_evicted_is_not_known(evicted: list[int], asked: int) -> None:
    names = EvictedNames.of(16)
    for name in evicted:
        names.remember(name, 1, 1.0)
    assert (asked in names) <= (asked in evicted)


def test_the_latest_are_known_whatever_else_is_remembered() -> None:
    draw = random.Random(1)
    names = EvictedNames.of(256)
    for number in range(10_000):
        last = draw.getrandbits(32)
        names.remember(last, 1, number / 10)
        assert last in names
    assert names.share < 1


def test_the_sample_stands_for_all() -> None:
    """Of ten times as many as there is room for, a third come back: so says the estimate."""
    draw = random.Random(2)
    names, behind = EvictedNames.of(1 << 12), TierBehind()
    evicted = [draw.getrandbits(32) for _ in range(40_000)]
    for number, name in enumerate(evicted):
        names.remember(name, MIB, number / 10)
    again = draw.sample(evicted, len(evicted) // 3)
    for name in again:
        if (found := names.pop(name, 40_000 / 10)) is not None:
            behind.missed(found)
    day = behind.shown(len(evicted), 4000.0)["ages"]["1d"]
    assert day["missed"] == pytest.approx(len(again), rel=0.1)
    assert day["read_bytes"] == pytest.approx(len(again) * MIB, rel=0.1)
    assert day["hit_rate_gain"] == pytest.approx(1 / 3, rel=0.1)


def test_what_is_older_than_a_day_gives_way_and_counts_for_nothing() -> None:
    names = EvictedNames.of(8)
    for name in range(8):
        names.remember(name, MIB, 0.0)
    names.remember(8, MIB, DAY_S + 1.0)
    assert names.share == 1
    old = next(name for name in range(8) if name in names)
    found = names.pop(old, DAY_S + 1.0)
    assert found is not None
    assert found.weight == 0


def test_another_server_goes_on_with_the_same_memory() -> None:
    words = np.zeros(words_of(8), np.uint64).data
    for name in range(9):
        EvictedNames(words).remember(name << 28, MIB, 0.0)
    share = EvictedNames(words).share
    assert 0 < share < 1
    found = EvictedNames(words).pop(0, 60.0)
    assert found is not None
    assert found.weight == pytest.approx(1 / share)


def test_figures_are_by_the_time_since_the_eviction() -> None:
    behind = TierBehind()
    for _ in range(4):
        behind.evicted(MIB)
    behind.missed(Return(30.0, MIB, 1.0))
    behind.missed(Return(3000.0, MIB, 1.0))
    behind.stored(Return(3000.0, MIB, 1.0))
    behind.missed(Return(30.0, MIB, 0.0))  # none of the sample
    shown = behind.shown(10, 7200.0)
    ages = shown["ages"]
    assert list(ages) == list(AGES_S)
    assert [age["missed"] for age in ages.values()] == [1, 1, 2, 2, 2]
    assert [age["stored_again"] for age in ages.values()] == [0, 0, 1, 1, 1]
    gains = [age["hit_rate_gain"] for age in ages.values()]
    assert gains == pytest.approx([1 / 10, 1 / 10, 3 / 11, 3 / 11, 3 / 11], abs=1e-6)
    assert [age["read_bytes"] / MIB for age in ages.values()] == [1, 1, 3, 3, 3]
    assert ages["1h"]["held_bytes"] == 2 * MIB
    assert ages["1d"]["held_bytes"] == 4 * MIB
    assert shown["daily_bytes"] == 48 * MIB


def test_nothing_is_shown_before_the_first_lookup() -> None:
    assert TierBehind().shown(0, 0.0)["ages"]["1d"]["hit_rate_gain"] is None
