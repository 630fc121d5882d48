"""Two commits of kvfs side by side: rates and the server's CPU time in alternating pairs, as JSON.

Run as root: ``python -m tests.bench.measure_commits OLD [PAIRS] [JOB...]``. OLD is a checkout of
the earlier commit (``git worktree add``) with a ``.venv`` that has its dependencies; the new one is
this tree. Each serves a pool on a loop device of its own in memory. A ratio above 1 is: the new one
is faster, or its server takes more CPU.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvfs.bench.daemon import Daemon
from kvfs.bench.jobs import Effort, JobRuns, default_jobs, select_jobs, spread
from kvfs.bench.self_made import check_room, fill_holes, folders, loop_device, torn_down, unmount
from kvfs.bench.sides import JobSide, run_jobs

NEW: Final = Path(__file__).resolve().parents[2]
DEVICE_BYTES: Final = 3 << 30
BACKING: Final = "/dev/shm"
PAIRS: Final = 9


def kvfs(tree: Path, *arguments: str) -> str:
    """Run the command of *tree*, with its own code; return what it prints."""
    done = subprocess.run(
        [tree / ".venv/bin/python", "-m", "kvfs.cli.main", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def side_of(stack: ExitStack, tree: Path, device: str, mountpoint: Path) -> JobSide:
    """Mount *device* with the code of *tree*."""
    mountpoint.mkdir()
    stack.callback(unmount, str(mountpoint))
    log = mountpoint.with_suffix(".log")
    stack.callback(log.unlink, missing_ok=True)
    kvfs(tree, "mount", "--data-path=passthrough", "--log-file", str(log), device, str(mountpoint))
    stack.callback(kvfs, tree, "umount", str(mountpoint))
    status = json.loads(kvfs(tree, "status", str(mountpoint), "--json"))
    return stack.enter_context(JobSide(str(mountpoint), Daemon(int(status["server_pid"]))))


def both_sides(stack: ExitStack, old: Path) -> list[tuple[JobSide, Path]]:
    """Serve a pool by *old* and one by this tree; return each with its mountpoint, *old* first."""
    check_room(2 * DEVICE_BYTES, BACKING)
    images, points = folders(stack, BACKING)
    trees = {"old": old, "new": NEW}
    devices = [stack.enter_context(loop_device(images / name, DEVICE_BYTES)) for name in trees]
    for tree, device in zip(trees.values(), devices, strict=True):
        kvfs(tree, "mkfs", device)
    fill_holes(*(images / name for name in trees))
    return [
        (side_of(stack, tree, device, points / name), points / name)
        for (name, tree), device in zip(trees.items(), devices, strict=True)
    ]


def figures(runs: JobRuns) -> dict[str, Any]:
    """Return the medians of the ratios within the pairs, with their quartiles."""
    operations = runs.work.operations(runs.job.threads)
    pairs = list(zip(runs.baseline, runs.kvfs, strict=True))
    rates = spread([old.wall_s / new.wall_s for old, new in pairs])
    old_us, new_us = (
        [1e6 * (sample.daemon_cpu_s or 0.0) / operations for sample in side]
        for side in (runs.baseline, runs.kvfs)
    )
    cpu = spread([new / old for old, new in zip(old_us, new_us, strict=True) if old > 0] or [1.0])
    return {
        "job": runs.job.name,
        "rate_new_over_old": round(rates.median, 3),
        "rate_quartiles": [round(rates.lower_quarter, 3), round(rates.upper_quarter, 3)],
        "cpu_new_over_old": round(cpu.median, 3),
        "cpu_quartiles": [round(cpu.lower_quarter, 3), round(cpu.upper_quarter, 3)],
        "server_us_old": round(spread(old_us).median, 1),
        "server_us_new": round(spread(new_us).median, 1),
    }


def measure(old: Path, pairs: int, patterns: list[str]) -> dict[str, Any]:
    """Run the jobs on both commits in turns."""
    jobs = select_jobs(patterns, full=False) if patterns else default_jobs()
    done: list[dict[str, Any]] = []
    with torn_down() as stack:
        (before, _), (after, _) = both_sides(stack, old)

        def show(runs: JobRuns) -> None:
            done.append(figures(runs))
            print(json.dumps(done[-1]), file=sys.stderr)

        run_jobs(
            before,
            after,
            jobs,
            Effort(data_bytes=512 << 20, load_bytes=2 << 30),
            range(pairs),
            start=lambda _: None,
            count=lambda: None,
            done=show,
        )
        memory = [
            side.daemon.anonymous_bytes() for side in (before, after) if side.daemon is not None
        ]
    memory_bytes = dict(zip(("old", "new"), memory, strict=True))
    return {"pairs": pairs, "jobs": done, "rss_anon_bytes": memory_bytes}


def main() -> int:
    """Measure and print."""
    old, *more = sys.argv[1:]
    pairs = int(more[0]) if more else PAIRS
    print(json.dumps(measure(Path(old).resolve(), pairs, more[1:]), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
