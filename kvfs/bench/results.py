"""What was measured, job by job, and the figures that follow from it. Pure.

A ratio is formed within its pair: two runs a second apart find the machine in the same state, and
two medians over minutes do not.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvfs.bench.jobs import Job, Work

GIGABYTE: Final = 1_000_000_000


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


class Sample(NamedTuple):
    """One run of one job on one side; the CPU time is the server's, None without a server."""

    wall_s: float
    daemon_cpu_s: float | None


@dataclass(slots=True)
class JobRuns:
    """The runs of one job: run *n* of each side makes pair *n*."""

    job: Job
    work: Work
    baseline: list[Sample] = field(default_factory=list)
    kvfs: list[Sample] = field(default_factory=list)


class JobResult(NamedTuple):
    """One job's comparison; rates are in *unit*, the server's CPU time is per operation."""

    job: Job
    unit: str
    comparison: Comparison
    daemon_us: Spread | None

    @property
    def daemon_ms_per_gb(self) -> float | None:
        """The server's CPU time per 10^9 bytes moved; None when the job moves none."""
        if self.daemon_us is None or not self.job.moves_bytes:
            return None
        return self.daemon_us.median / 1e3 * GIGABYTE / self.job.size_bytes

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None for a job without one."""
        goal = self.job.goal
        return None if goal is None else self.comparison.ratio.median >= goal.at_least


class DaemonCost(NamedTuple):
    """A limit for the server's CPU time; *measured* is None if its job did not run."""

    title: str
    unit: str
    job_name: str
    at_most: float
    measured: float | None


def summarise(runs: JobRuns) -> JobResult:
    """Return the result of *runs*; raises ``ValueError`` if there are none."""
    job, operations = runs.job, runs.work.operations(runs.job.threads)
    amount = operations * job.size_bytes / GIGABYTE if job.moves_bytes else operations / 1e3
    pairs = [
        Pair(amount / one.wall_s, amount / other.wall_s)
        for one, other in zip(runs.baseline, runs.kvfs, strict=True)
    ]
    cpu_us = [
        sample.daemon_cpu_s * 1e6 / operations
        for sample in runs.kvfs
        if sample.daemon_cpu_s is not None
    ]
    unit = "GB/s" if job.moves_bytes else "K/s"
    return JobResult(job, unit, compare(pairs), spread(cpu_us) if cpu_us else None)


def daemon_costs(results: Sequence[JobResult]) -> list[DaemonCost]:
    """Return the CPU costs of the server that have a limit, each from the job that shows it."""
    by_name = {result.job.name: result for result in results}

    def median_us(name: str) -> float | None:
        found = by_name.get(name)
        return None if found is None or found.daemon_us is None else found.daemon_us.median

    opened, stored, loaded = "open-close-1t", "store-4m-2t-buffered", "load-32m-2t-buffered"
    per_gb = by_name[loaded].daemon_ms_per_gb if loaded in by_name else None
    return [
        DaemonCost("warm open + close", "us", opened, 40.0, median_us(opened)),
        DaemonCost("store cycle", "us", stored, 250.0, median_us(stored)),
        DaemonCost("load of 32 MiB blocks", "ms/GB", loaded, 5.0, per_gb),
    ]


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
