"""What follows from a list of alternating pairs: medians, ratios within pairs, their spread. Pure.

A ratio is formed within its pair: two runs a second apart find the machine in the same state, and
two medians over minutes do not.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Pair(NamedTuple):
    """The rates of one pair of runs, in the job's unit; more is better."""

    baseline_rate: float
    kvfs_rate: float


class Spread(NamedTuple):
    """The median and the ends of some numbers; the quarters are inclusive quartiles."""

    median: float
    low: float
    high: float
    lower_quarter: float
    upper_quarter: float


class Comparison(NamedTuple):
    """One job's pairs, summed up."""

    baseline: Spread
    kvfs: Spread
    ratio: Spread
    ratios: tuple[float, ...]


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of *values*; raises ``ValueError`` when there are none."""
    if not values:
        raise ValueError("no values to take a median of")
    if len(values) == 1:
        return Spread(*(values[0],) * 5)
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, min(values), max(values), lower, upper)


def compare(pairs: Sequence[Pair]) -> Comparison:
    """Return the comparison of *pairs*; raises ``ValueError`` for none or for a rate of zero."""
    if any(pair.baseline_rate <= 0 or pair.kvfs_rate <= 0 for pair in pairs):
        raise ValueError("a rate must be above zero")
    ratios = tuple(pair.kvfs_rate / pair.baseline_rate for pair in pairs)
    return Comparison(
        spread([pair.baseline_rate for pair in pairs]),
        spread([pair.kvfs_rate for pair in pairs]),
        spread(ratios),
        ratios,
    )


def first_is_baseline(pair_no: int) -> bool:
    """Tell whether the baseline comes first in pair *pair_no* (from 0): the sides take turns."""
    return pair_no % 2 == 0
