"""Runs the jobs one after the other, each on both sides in alternating pairs."""

from collections.abc import Callable, Sequence

from kvfs.bench.crew import Crew
from kvfs.bench.jobs import Effort, Job, Work, plan_work
from kvfs.bench.results import JobRuns
from kvfs.bench.sides import JobSide
from kvfs.bench.stats import first_is_baseline


def run_job(
    crew: Crew,
    baseline: JobSide,
    kvfs: JobSide,
    job: Job,
    work: Work,
    pairs: range,
    count: Callable[[], None],
) -> JobRuns:
    """Run *job* in alternating pairs numbered *pairs*; one run of each side before does not count.

    *count* is called after every pair. Raises ``BenchFailed``.
    """
    runs = JobRuns(job, work)
    for side in (baseline, kvfs):
        side.run(crew, job, work)
    for pair_no in pairs:
        turns = [(baseline, runs.baseline), (kvfs, runs.kvfs)]
        for side, samples in turns if first_is_baseline(pair_no) else reversed(turns):
            samples.append(side.run(crew, job, work))
        count()
    return runs


def run_jobs(
    baseline: JobSide,
    kvfs: JobSide,
    jobs: Sequence[Job],
    effort: Effort,
    pairs: range,
    *,
    start: Callable[[Job], None],
    count: Callable[[], None],
    done: Callable[[JobRuns], None],
) -> list[JobRuns]:
    """Run all *jobs* with one crew; the callbacks report progress. Raises ``BenchFailed``."""
    threads = max(job.threads for job in jobs)
    results = []
    with Crew(threads, max(job.size_bytes for job in jobs)) as crew:
        for job in jobs:
            start(job)
            results.append(run_job(crew, baseline, kvfs, job, plan_work(job, effort), pairs, count))
            done(results[-1])
    return results
