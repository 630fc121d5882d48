"""The two sides of a comparison, a directory each; jobs run on both in alternating pairs."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvfs.bench.crew import Crew, WorkOrder
from kvfs.bench.daemon import Daemon
from kvfs.bench.jobs import (
    Effort,
    Job,
    JobKind,
    JobRuns,
    Mode,
    Sample,
    Work,
    first_is_baseline,
    plan_work,
)
from kvfs.core.errors import UsageError

_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
_VERBS: Final = {
    JobKind.LOAD: "load",
    JobKind.STORE: "store",
    JobKind.STAT: "stat",
    JobKind.ACCESS: "access",
    JobKind.OPEN: "open_close",
    JobKind.DELETE: "delete",
}


class JobSide:
    """A directory of its own under *root*, removed on leaving; *daemon* serves it, if any."""

    def __init__(self, root: str, daemon: Daemon | None) -> None:
        name = f"kvfs-bench-{os.getpid()}-{time.monotonic_ns():x}"
        self.directory = os.path.abspath(os.path.join(root, name))  # workers change theirs
        self.daemon = daemon
        self._rounds = 0

    def __enter__(self) -> Self:
        try:
            os.mkdir(self.directory)
        except OSError as error:
            raise UsageError(f"{self.directory} cannot be created: {error.strerror}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, crew: Crew, job: Job, work: Work) -> Sample:
        """Run *job* once; what it needs is stored before and deleted after, untimed.

        Nothing is kept from run to run. So both sides alternately take their page cache from the
        same free memory; otherwise one side could keep the faster pages for a whole job.
        """
        one_round = {JobKind.STORE: self._store_round, JobKind.DELETE: self._delete_round}.get(
            job.kind, self._warm_round
        )
        rounds = [one_round(crew, job, work) for _ in range(work.rounds)]
        cpu_s = [sample.daemon_cpu_s for sample in rounds if sample.daemon_cpu_s is not None]
        return Sample(sum(s.wall_s for s in rounds), sum(cpu_s) if cpu_s else None)

    def settle(self) -> None:
        """Wait until nothing of an earlier run is still being written or freed."""
        os.sync()
        if self.daemon is not None:
            self.daemon.settle()

    def _warm_round(self, crew: Crew, job: Job, work: Work) -> Sample:
        """Store what *job* reads, the way it reads; go over it twice, and time the second pass."""
        orders = self._orders(job, work)
        action = orders[_VERBS[job.kind]]
        if job.kind is not JobKind.ACCESS:
            crew.run(orders["store"])
        self.settle()
        crew.run(action._replace(passes=1))
        if job.mode is Mode.COLD:
            _DROP_CACHES.write_text("1")
        sample = self._timed(crew, action)
        if job.kind is not JobKind.ACCESS:
            crew.run(orders["delete"])
        return sample

    def _store_round(self, crew: Crew, job: Job, work: Work) -> Sample:
        orders = self._orders(job, work)
        self.settle()
        sample = self._timed(crew, orders["store"])
        crew.run(orders["delete"])
        return sample

    def _delete_round(self, crew: Crew, job: Job, work: Work) -> Sample:
        orders = self._orders(job, work)
        crew.run(orders["store"])
        self.settle()
        return self._timed(crew, orders["delete"])

    def _timed(self, crew: Crew, order: WorkOrder) -> Sample:
        if self.daemon is None:
            return Sample(crew.run(order), None)
        before_ns = self.daemon.cpu_ns()
        wall_s = crew.run(order)
        # Work that the server postpones until after its replies is part of what the job costs.
        self.daemon.settle()
        return Sample(wall_s, (self.daemon.cpu_ns() - before_ns) / 1e9)

    def _orders(self, job: Job, work: Work) -> dict[str, WorkOrder]:
        """Return the orders of one round by verb, with names that were never used before."""
        self._rounds += 1
        order = WorkOrder(
            do="",
            directory=self.directory,
            salt=f"round-{self._rounds}",
            blocks=work.blocks_per_thread * job.threads,
            size_bytes=job.size_bytes,
            threads=job.threads,
            passes=work.passes,
            direct=job.mode is Mode.DIRECT,
        )
        return {verb: order._replace(do=verb) for verb in ("store", "delete", _VERBS[job.kind])}


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
