"""`kvfs bench compare --self-contained` on a real mount: it measures, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks.process import Process, run
from tests.support.mounts.mounting import ROOT, why_no_mounts

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.needs_loop,
    pytest.mark.skipif(why_no_mounts() is not None, reason=str(why_no_mounts())),
]

JOBS = "store-4m-1t-buffered,load-4m-1t-direct,open-close-1t"


def command(directory: Path) -> list[str]:
    """A run of a few seconds on devices as small as XFS takes them."""
    flags = [
        "--quick",
        "--device-size",
        "512M",
        "--pairs",
        "2",
        "--set-ups",
        "2",
        "--jobs",
        JOBS,
        "--json",
        "-",
    ]
    where = ["--self-contained", "--backing", str(directory)]
    return [sys.executable, "-m", "kvfs.cli.main", "bench", "compare", *where, *flags]


def left_behind(directory: Path, temporary: Path) -> list[str]:
    """Name every mount, loop device and file of a run in *directory* that is still there."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    loops = subprocess.run(["losetup", "--list"], check=True, capture_output=True, text=True)
    lines = [*mounts, *loops.stdout.splitlines()]
    found = [line for line in lines if str(directory) in line or str(temporary) in line]
    return found + os.listdir(directory) + os.listdir(temporary)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The directory for the devices, and the one that TMPDIR names."""
    backing, temporary = tmp_path / "backing", tmp_path / "temporary"
    backing.mkdir()
    temporary.mkdir()
    return backing, temporary


def test_it_measures_a_pool_of_its_own_and_takes_it_down(places: tuple[Path, Path]) -> None:
    backing, temporary = places
    done = run(
        command(backing),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["baseline"]["fs_type"] == "xfs"
    assert (report["set_ups"], report["pairs"]) == (2, 2)
    assert all(len(job["ratio"]["pairs"]) == 2 for job in report["jobs"])
    assert report["mount"]["data_path"] in ("passthrough", "daemon")
    assert report["rss_anon_bytes"] > 0
    costs = {job["name"]: job["daemon_us_per_operation"]["median"] for job in report["jobs"]}
    assert sorted(costs) == sorted(JOBS.split(","))
    assert all(cost > 0 for cost in costs.values())
    assert left_behind(backing, temporary) == []


def test_a_stop_in_the_middle_takes_it_down_too(places: tuple[Path, Path]) -> None:
    backing, temporary = places
    with Process(
        command(backing),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            # The first job's line: both sides are mounted, and the workers run.
            if line.startswith("load-"):
                break
        running.send_signal(signal.SIGTERM)
        rest = running.stderr.read()
    assert running.returncode == 143, rest
    assert "terminated" in rest
    assert left_behind(backing, temporary) == []
