"""One whole comparison: check both places, run the jobs, note what the figures depend on."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final, NamedTuple

from kvfs import __version__
from kvfs.bench.daemon import Daemon, mount_status
from kvfs.bench.jobs import Effort, Job, JobRuns, Mode
from kvfs.bench.output import Output
from kvfs.bench.self_made import Places, free_bytes
from kvfs.bench.sides import JobSide, run_jobs
from kvfs.core.errors import BenchFailed, NotRoot, UsageError
from kvfs.core.sizes import format_size
from kvfs.doctor.machine_rules import SLOW_TRIP_US
from kvfs.machine.hardware import round_trip_us
from kvfs.machine.mount_table import Mount, mount_of

#: Above it the cost of a rare request says more about the machine than about kvfs (rest_factor).
COLD_REST_FACTOR: Final = 3.0
#: Some 30 us of work for the interpreter, like a request.
_VALUE: Final = {str(number): [number, number / 7] for number in range(8)}
#: The requests of large loads come milliseconds apart.
REST_S: Final = 0.005
_IN_A_LOOP: Final = 400
_AFTER_A_REST: Final = 60


class ComparisonPlan(NamedTuple):
    """What to run, and the data path that the mount must have unless it is ``auto``.

    *pairs* are the numbers of the pairs; each number decides which side comes first.
    """

    jobs: Sequence[Job]
    effort: Effort
    pairs: range
    data_path: str


class ComparisonOutcome(NamedTuple):
    """What was measured, and in which setting (the head of the JSON report)."""

    runs: list[JobRuns]
    setting: dict[str, Any]


def split_pairs(pairs: int, set_ups: int) -> list[range]:
    """Return the numbers of the pairs that each set-up runs: as even as possible, none empty."""
    set_ups = min(pairs, set_ups)
    starts = [pairs * index // set_ups for index in range(set_ups + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def join(outcomes: Sequence[ComparisonOutcome]) -> ComparisonOutcome:
    """Return the outcomes of several set-ups as one, with all pairs of each job."""
    first = outcomes[0].setting
    joined = [
        JobRuns(
            same_job[0].job,
            same_job[0].work,
            [sample for runs in same_job for sample in runs.baseline],
            [sample for runs in same_job for sample in runs.kvfs],
        )
        for same_job in zip(*(outcome.runs for outcome in outcomes), strict=True)
    ]
    rss = [outcome.setting["rss_anon_bytes"] for outcome in outcomes]
    return ComparisonOutcome(
        joined,
        {
            **first,
            "set_ups": len(outcomes),
            "pairs": sum(outcome.setting["pairs"] for outcome in outcomes),
            "rss_anon_bytes": None if first["rss_anon_bytes"] is None else max(rss),
            "elapsed_s": round(sum(outcome.setting["elapsed_s"] for outcome in outcomes), 1),
        },
    )


def check_places(places: Places, plan: ComparisonPlan) -> None:
    """Raise ``UsageError`` or ``NotRoot`` if the plan cannot run there, before anything is run."""
    for place in places:
        if not os.path.isdir(place):
            raise UsageError(f"{place} is not a directory")
    if os.path.realpath(places.baseline) == os.path.realpath(places.mount):
        raise UsageError("--mount and --baseline are the same directory")
    largest = max(job.size_bytes * job.threads for job in plan.jobs)
    need_bytes = max(plan.effort.data_bytes, largest) * 5 // 4
    whole = os.statvfs(places.mount)
    # The pool may be full of evictable blocks: its size counts, not its free space.
    for place, room in (
        (places.baseline, free_bytes(places.baseline)),
        (places.mount, whole.f_blocks * whole.f_frsize),
    ):
        if room < need_bytes:
            raise UsageError(
                f"{place} has room for {format_size(room)}, the jobs need "
                f"{format_size(need_bytes)}: choose a smaller --data"
            )
    if os.geteuid() != 0 and any(job.mode is Mode.COLD for job in plan.jobs):
        raise NotRoot("cold jobs drop the page cache, which needs root: leave them out with --jobs")


def compare(places: Places, plan: ComparisonPlan, output: Output) -> ComparisonOutcome:
    """Run *plan* in both *places* and return its outcome. Raises ``BenchFailed``."""
    started_s, machine = time.monotonic(), machine_facts()
    if machine["load_before"] > machine["cpus"] / 2:
        output.say("this machine is busy with other work: the figures will vary")
    if (machine["wake_trip_us"] or 0) > SLOW_TRIP_US:
        output.say(
            f"a wake-up round trip between two CPUs takes {machine['wake_trip_us']:.0f} us, and "
            "every request pays for it: `kvfs doctor` shows the fix"
        )
    if machine["rest_factor"] > COLD_REST_FACTOR:
        output.say(
            f"after {1000 * REST_S:.0f} ms idle code takes {machine['rest_factor']:.1f} times as "
            "long here: others use the CPU caches, which adds to the server's CPU time"
        )
    baseline_on, mount_on = _mount_of(places.baseline), _mount_of(places.mount)
    status = _status(mount_on.mountpoint, plan.data_path, output)
    daemon = None if status is None else Daemon(int(status["server_pid"]))
    with ExitStack() as stack:
        baseline = stack.enter_context(JobSide(places.baseline, None))
        kvfs = stack.enter_context(JobSide(places.mount, daemon))
        runs = run_jobs(
            baseline,
            kvfs,
            plan.jobs,
            plan.effort,
            plan.pairs,
            start=lambda job: output.describe(job.name),
            count=output.count,
            done=output.end_job,
        )
    setting = {
        "kvfs": __version__,
        "machine": machine,
        "baseline": {"path": places.baseline, "fs_type": baseline_on.fs_type},
        "mount": {
            "path": places.mount,
            "fs_type": mount_on.fs_type,
            "data_path": status.get("data_path") if status else None,
            "data_path_reason": status.get("data_path_reason") if status else None,
        },
        "pairs": len(plan.pairs),
        "data_bytes": plan.effort.data_bytes,
        "rss_anon_bytes": daemon.anonymous_bytes() if daemon else None,
        "elapsed_s": round(time.monotonic() - started_s, 1),
    }
    return ComparisonOutcome(runs, setting)


def _status(mountpoint: str, data_path: str, output: Output) -> dict[str, Any] | None:
    """Return the server's status, None without a server. Raises ``BenchFailed`` (data path)."""
    try:
        status = mount_status(mountpoint)
    except BenchFailed as error:
        _insist_on_data_path(data_path, None, mountpoint, str(error))
        output.say(f"{error}: CPU and memory of the server are not measured")
        return None
    reason = status.get("data_path_reason") or "no reason given"
    _insist_on_data_path(data_path, status.get("data_path"), mountpoint, reason)
    return status


def _insist_on_data_path(wanted: str, found: str | None, mountpoint: str, reason: str) -> None:
    if wanted not in ("auto", found):
        raise BenchFailed(f"the data path of {mountpoint} is {found}, not {wanted}: {reason}")


def _mount_of(path: str) -> Mount:
    return mount_of(os.path.realpath(path)) or Mount("/", "unknown", "", "", ())


def machine_facts() -> dict[str, Any]:
    """Return what the figures depend on: kernel, CPUs, memory, and how busy they are."""
    trip_us = round_trip_us()
    return {
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "wake_trip_us": None if trip_us is None else round(trip_us, 1),
        "rest_factor": round(rest_factor(), 1),
    }


def _work() -> None:
    json.loads(json.dumps(_VALUE, sort_keys=True))


def rest_factor(
    work: Callable[[], object] = _work,
    clock_ns: Callable[[], int] = time.thread_time_ns,
    rest: Callable[[float], None] = time.sleep,
) -> float:
    """Return the CPU time of *work* after a rest, divided by that in a loop. Takes 0.5 s.

    If nobody else uses the CPU's caches, the server's code is still in them when the next request
    comes. If other virtual machines or large loads use them, it comes from memory again, line by
    line: the same work was seen to take six to ten times the CPU time.
    """
    in_a_loop = [_took_ns(work, clock_ns) for _ in range(_IN_A_LOOP)]
    rested = []
    for _ in range(_AFTER_A_REST):
        rest(REST_S)
        rested.append(_took_ns(work, clock_ns))
    return statistics.median(rested) / max(1, statistics.median(in_a_loop))


def _took_ns(work: Callable[[], object], clock_ns: Callable[[], int]) -> int:
    started_ns = clock_ns()
    work()
    return clock_ns() - started_ns
