"""Which jobs there are, how much work each one is, and what was measured, job by job. Pure.

The sizes are those of real connectors. 2, 4 and 32 MiB are Llama-3.1-8B under vLLM, on one of eight
ranks, and under LMCache. The odd ones are DeepSeek-V3's latent cache at 16 and 256 tokens, and
LMCache's 4 MiB with its 28-byte header.

A ratio is formed within its pair: two runs a second apart find the machine in the same state, and
two medians over minutes do not.
"""

import fnmatch
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kvfs.bench.kv_shapes import SHAPES
from kvfs.core.errors import UsageError
from kvfs.core.sizes import GIB, MIB
from kvfs.core.types import PAGE_BYTES

EVEN_SIZES: Final = (2 * MIB, 4 * MIB, 32 * MIB)
_LARGE: Final = [shape.size_bytes for shape in SHAPES if shape.size_bytes > MIB]
ODD_SIZES: Final = tuple(sorted(size_bytes for size_bytes in _LARGE if size_bytes % MIB))
THREADS: Final = (1, 2, 4, 8)
#: For lookups and opens, whose cost does not depend on the size of the file.
SMALL_BYTES: Final = PAGE_BYTES
GIGABYTE: Final = 1_000_000_000


class JobKind(StrEnum):
    """What a job does with each of its blocks."""

    LOAD = "load"
    STORE = "store"
    STAT = "stat-hit"
    ACCESS = "access-miss"
    OPEN = "open-close"
    DELETE = "delete"


class Mode(StrEnum):
    """How the bytes move: through a warm page cache, around it, or through an empty one."""

    BUFFERED = "buffered"
    DIRECT = "direct"
    COLD = "cold"


class RateGoal(NamedTuple):
    """The rate of kvfs divided by the baseline's: what must be reached, and what is the aim."""

    at_least: float
    aim: float


@dataclass(frozen=True, slots=True)
class Job:
    """One thing that is timed on both sides."""

    kind: JobKind
    threads: int
    size_bytes: int = SMALL_BYTES
    mode: Mode = Mode.BUFFERED

    @property
    def moves_bytes(self) -> bool:
        """Whether its rate is in bytes a second; other jobs count calls a second."""
        return self.kind in {JobKind.LOAD, JobKind.STORE}

    @property
    def name(self) -> str:
        """The name that ``--jobs`` matches, such as ``load-32m-2t-buffered``."""
        parts = [self.kind.value]
        if self.moves_bytes or self.kind is JobKind.DELETE:
            parts.append(size_name(self.size_bytes))
        parts.append(f"{self.threads}t")
        if self.moves_bytes:
            parts.append(self.mode.value)
        return "-".join(parts)

    @property
    def goal(self) -> RateGoal | None:
        """The project's own goal for this job, if it has one."""
        return GOALS.get(self.name)


class Effort(NamedTuple):
    """How much one run of a job does; the defaults make it last about half a second."""

    data_bytes: int = GIB
    load_bytes: int = 4 * GIB
    rounds: int = 2
    names: int = 1024
    calls: int = 400_000
    opens: int = 10_240


#: A smoke run: every line is executed, the figures mean little.
QUICK: Final = Effort(
    data_bytes=16 * MIB, load_bytes=32 * MIB, rounds=1, names=64, calls=2048, opens=256
)
#: How many blocks of a data set are opened; real hosts reload what they loaded recently.
_OPEN_NAMES: Final = 256
#: No data set has more blocks than this, however small they are.
_MOST_BLOCKS: Final = 4096


class Work(NamedTuple):
    """One run: *rounds* times with new blocks, over which each thread goes *passes* times."""

    blocks_per_thread: int
    passes: int
    rounds: int

    def operations(self, threads: int) -> int:
        """Return how many blocks all threads together handle in one run."""
        return self.blocks_per_thread * self.passes * self.rounds * threads


def plan_work(job: Job, effort: Effort) -> Work:
    """Return how much *job* does in one run."""
    if job.kind in {JobKind.STAT, JobKind.ACCESS}:
        names = max(1, effort.names // job.threads)
        return Work(names, max(1, effort.calls // (names * job.threads)), 1)
    if job.kind is JobKind.OPEN:
        names = max(1, _OPEN_NAMES // job.threads)
        return Work(names, max(1, effort.opens // (names * job.threads)), 1)
    blocks = max(1, min(_MOST_BLOCKS, effort.data_bytes // job.size_bytes) // job.threads)
    if job.kind is not JobKind.LOAD:
        return Work(blocks, 1, effort.rounds)
    if job.mode is Mode.COLD:
        return Work(blocks, 1, 1)
    return Work(blocks, max(1, effort.load_bytes // (blocks * job.threads * job.size_bytes)), 1)


def size_name(size_bytes: int) -> str:
    """Return ``32m`` for whole MiB, else the bare number of bytes with a ``b``."""
    whole, rest = divmod(size_bytes, MIB)
    return f"{size_bytes}b" if rest else f"{whole}m"


def _table() -> dict[Job, RateGoal]:
    """Return the jobs of the default run with the goals that the project has set itself."""
    load, store, buffered, direct = JobKind.LOAD, JobKind.STORE, Mode.BUFFERED, Mode.DIRECT
    large, small = 32 * MIB, 4 * MIB
    return {
        Job(load, 2, large, buffered): RateGoal(0.95, 1.0),
        Job(load, 2, large, direct): RateGoal(0.95, 1.0),
        Job(store, 2, large, direct): RateGoal(0.95, 1.0),
        Job(store, 2, large, buffered): RateGoal(0.80, 0.95),
        Job(load, 2, small, buffered): RateGoal(0.80, 0.95),
        Job(load, 2, small, direct): RateGoal(0.90, 1.0),
        Job(store, 2, small, direct): RateGoal(0.85, 1.0),
        Job(store, 2, small, buffered): RateGoal(0.45, 0.80),
        Job(JobKind.STAT, 1): RateGoal(0.85, 1.0),
        Job(JobKind.ACCESS, 1): RateGoal(0.85, 1.0),
    }


_TABLE: Final = _table()
GOALS: Final = {job.name: goal for job, goal in _TABLE.items()}


def default_jobs() -> list[Job]:
    """Return the jobs of a run without flags: those with a goal, and the opens."""
    return [*_TABLE, Job(JobKind.OPEN, 1)]


def all_jobs() -> list[Job]:
    """Return every job: ``--full`` runs them all, ``--jobs`` chooses from them."""
    jobs = [
        Job(kind, threads, size_bytes, mode)
        for kind in (JobKind.LOAD, JobKind.STORE)
        for size_bytes in sorted(EVEN_SIZES + ODD_SIZES)
        for mode in (Mode.BUFFERED, Mode.DIRECT)
        for threads in THREADS
        # O_DIRECT needs whole pages. Connectors fall back to the page cache, which is another job.
        if mode is Mode.BUFFERED or size_bytes % PAGE_BYTES == 0
    ]
    jobs += [Job(JobKind.LOAD, 2, size_bytes, Mode.COLD) for size_bytes in EVEN_SIZES]
    jobs += [Job(kind, n) for kind in (JobKind.STAT, JobKind.ACCESS, JobKind.OPEN) for n in THREADS]
    jobs += [Job(JobKind.DELETE, n, size) for size in EVEN_SIZES for n in (1, 2)]
    return jobs


def select_jobs(patterns: Sequence[str], *, full: bool) -> list[Job]:
    """Return the jobs to run, in the order of the tables.

    *patterns* are shell patterns for the names of all jobs. Without any, it is the default table,
    or everything if *full*. Raises ``UsageError`` for a pattern that matches nothing.
    """
    if not patterns:
        return all_jobs() if full else default_jobs()
    jobs = all_jobs()
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(job.name, pattern) for job in jobs):
            raise UsageError(f"no job matches {pattern!r}; `kvfs bench jobs` lists them")
    return [job for job in jobs if any(fnmatch.fnmatchcase(job.name, p) for p in patterns)]


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
