"""Ages of evicted blocks: quantiles are near the exact ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.reuse import AgeHistogram

YEAR_S = 365 * 86_400.0


@given(ages=st.lists(st.floats(0.1, YEAR_S), min_size=1), share=st.floats(0.01, 1))
def test_a_quantile_is_within_a_tenth(ages: list[float], share: float) -> None:
    histogram = AgeHistogram()
    for age_s in ages:
        histogram.add(age_s)
    exact_s = sorted(ages)[max(1, math.ceil(share * len(ages))) - 1]
    assert histogram.quantile_s(share) == pytest.approx(exact_s, rel=0.1)


@given(age_s=st.floats(-1e9, 1e18))
def test_any_age_has_a_place(age_s: float) -> None:
    histogram = AgeHistogram()
    histogram.add(age_s)
    assert histogram.quantile_s(0.5) is not None


def test_there_is_no_quantile_of_nothing() -> None:
    assert AgeHistogram().quantile_s(0.5) is None


def test_the_quantiles_follow_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.core.reuse._AGES_HALVED_AFTER", 64)
    histogram = AgeHistogram()
    for age_s in [1.0] * 1000 + [1000.0] * 200:
        histogram.add(age_s)
    found_s = histogram.quantile_s(0.5)
    assert found_s is not None
    assert found_s > 500
