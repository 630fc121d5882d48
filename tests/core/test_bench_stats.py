"""Medians, ratios and spreads of alternating pairs."""

import pytest

from kvfs.bench.jobs import Pair, compare, first_is_baseline, spread


def test_the_median_is_not_moved_by_one_wild_run() -> None:
    found = spread([1.0, 1.1, 1.2, 1.3, 90.0])
    assert (found.median, found.low, found.high) == (1.2, 1.0, 90.0)
    assert (found.lower_quarter, found.upper_quarter) == (1.1, 1.3)


def test_an_even_number_of_runs_has_its_median_between_two() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]).median == 2.5


def test_one_run_is_its_own_spread() -> None:
    assert set(spread([3.0])) == {3.0}


def test_no_runs_have_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_the_ratio_is_formed_within_each_pair() -> None:
    # The machine slows down fourfold on the way and each pair still says 0.5; the ratio of the
    # fastest to the slowest run would say otherwise.
    pairs = [Pair(8.0, 4.0), Pair(4.0, 2.0), Pair(2.0, 1.0)]
    found = compare(pairs)
    assert found.ratios == (0.5, 0.5, 0.5)
    assert (found.ratio.median, found.baseline.median, found.kvfs.median) == (0.5, 4.0, 2.0)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        compare([Pair(0.0, 1.0)])


def test_the_sides_take_turns_in_coming_first() -> None:
    assert [first_is_baseline(n) for n in range(4)] == [True, False, True, False]
