"""`kvfs bench` end to end on two plain directories, and what makes a run fail."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs.bench import daemon
from kvfs.bench.crew import Crew, WorkOrder
from kvfs.bench.self_made import fill_holes
from kvfs.cli.main import main
from kvfs.core.errors import BenchFailed, UsageError
from tests.support.forks.process import run

ROOT = Path(__file__).resolve().parents[2]
KIB = 1 << 10


def kvfs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    argv = [sys.executable, "-m", "kvfs.cli.main", *arguments]
    return run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def compare(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compare two directories that are the same thing, doing very little."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    places = ("--mount", str(tmp_path / "a"), "--baseline", str(tmp_path / "b"))
    return kvfs("bench", "compare", *places, "--quick", "--data", "2M", "--pairs", "2", *flags)


def left_in(tmp_path: Path) -> list[str]:
    """Name what a run left behind."""
    return [name for side in ("a", "b") for name in os.listdir(tmp_path / side)]


@contextmanager
def readonly(directory: Path) -> Iterator[None]:
    """Let *directory* be a file system that takes nothing."""
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64M", "none", str(directory)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_comparison_of_two_directories_reports_every_job(tmp_path: Path) -> None:
    jobs = (
        "load-2m-1t-buffered,store-1124352b-2t-buffered,*-hit-1t,*-miss-2t,open-*-1t,delete-2m-1t"
    )
    done = compare(tmp_path, "--jobs", jobs, "--json", "-", "--plot", str(tmp_path / "plot.svg"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [job["name"] for job in report["jobs"]] == [
        "load-2m-1t-buffered",
        "store-1124352b-2t-buffered",
        "stat-hit-1t",
        "access-miss-2t",
        "open-close-1t",
        "delete-2m-1t",
    ]
    for job in report["jobs"]:
        assert len(job["ratio"]["pairs"]) == report["pairs"] == 2
        assert job["ratio"]["low"] <= job["ratio"]["median"] <= job["ratio"]["high"]
        assert job["kvfs"]["median"] > 0
        assert job["daemon_us_per_operation"] is None
    assert report["mount"]["data_path"] is None
    assert report["rss_anon_bytes"] is None
    # With the JSON on stdout the table is on stderr.
    assert "store-1124352b-2t-buffered" in done.stderr
    assert ET.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")
    assert left_in(tmp_path) == []


def test_the_report_goes_to_a_file_and_the_table_to_stdout(tmp_path: Path) -> None:
    done = compare(tmp_path, "--jobs", "stat-hit-1t", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert "stat-hit-1t" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["jobs"][0]["name"] == "stat-hit-1t"


def test_insisting_on_a_data_path_fails_where_no_kvfs_serves(tmp_path: Path) -> None:
    done = compare(tmp_path, "--jobs", "stat-hit-1t", "--data-path", "passthrough")
    assert done.returncode == BenchFailed.exit_code
    assert "is None, not passthrough: no kvfs is mounted at " in done.stderr
    assert left_in(tmp_path) == []


def test_why_there_are_no_figures_of_a_server_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who may not ask the server is not told that there is none."""
    said = "kvfs: the socket is for root; run this as root"
    monkeypatch.setattr(daemon, "KVFS", ("sh", "-c", f"echo {said!r} >&2; exit 3"))
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
    places = ("--mount", str(tmp_path / "a"), "--baseline", str(tmp_path / "b"))
    flags = ("--quick", "--data", "2M", "--pairs", "1", "--jobs", "stat-hit-1t")
    assert main(["bench", "compare", *places, *flags]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "the socket is for root; run this as root: CPU and memory of the" in shown


@pytest.mark.parametrize(
    "flags",
    [
        ["--mount", "/nowhere"],
        ["--mount", "/nowhere", "--baseline", "/"],
        ["--mount", "/", "--baseline", "/"],
        ["--mount", "/", "--self-contained"],
        ["--mount", "/", "--baseline", "/tmp", "--jobs", "nothing-*"],
        ["--mount", "/", "--baseline", "/tmp", "--pairs", "0"],
        ["--mount", "/", "--baseline", "/tmp", "--data", "much"],
        ["--mount", "/", "--baseline", "/tmp", "--data", "1000T"],
        ["--mount", "/", "--baseline", "/tmp", "--json", "/nowhere/out.json"],
    ],
    ids=" ".join,
)
def test_wrong_flags_are_one_line(flags: list[str]) -> None:
    done = kvfs("bench", "compare", *flags)
    assert done.returncode == UsageError.exit_code, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvfs: ")


@pytest.mark.needs_fuse
def test_a_place_that_takes_no_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    flags = ("--quick", "--data", "2M", "--jobs", "stat-hit-1t")
    with readonly(tmp_path / "a"):
        done = kvfs(
            "bench", "compare", "--mount", str(tmp_path / "a"), "--baseline", str(tmp_path), *flags
        )
    assert done.returncode == UsageError.exit_code
    assert "cannot be created: Read-only file system" in done.stderr.splitlines()[-1]
    assert "internal" not in done.stderr


def test_places_may_be_relative(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
    places = [os.path.relpath(tmp_path / side, ROOT) for side in ("a", "b")]
    flags = ("--quick", "--data", "2M", "--pairs", "1", "--jobs", "store-2m-1t-buffered")
    done = kvfs("bench", "compare", "--mount", places[0], "--baseline", places[1], *flags)
    assert done.returncode == 0, done.stderr
    assert left_in(tmp_path) == []


def test_a_refused_run_keeps_earlier_results(tmp_path: Path) -> None:
    kept, made = tmp_path / "kept.json", tmp_path / "made.svg"
    kept.write_text("{}")
    done = compare(tmp_path, "--jobs", "no-*", "--json", str(kept), "--plot", str(made))
    assert done.returncode == UsageError.exit_code
    places = ("--mount", "/nowhere", "--baseline", "/")
    done = kvfs("bench", "compare", *places, "--json", str(kept), "--plot", str(made))
    assert done.returncode == UsageError.exit_code
    assert kept.read_text() == "{}"
    assert not made.exists()


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_results_that_cannot_be_written_are_one_line(tmp_path: Path, flag: str) -> None:
    done = compare(tmp_path, "--jobs", "stat-hit-1t", flag, "/dev/full")
    assert done.returncode == 1
    assert "stat-hit-1t" in done.stdout
    assert done.stderr.endswith("kvfs: cannot write /dev/full: No space left on device\n")


def test_the_job_list_marks_the_usual_ones() -> None:
    lines = kvfs("bench", "jobs").stdout.splitlines()
    assert "* load-32m-2t-buffered" in lines
    assert "  load-32m-8t-buffered" in lines


@pytest.fixture
def crew() -> Iterator[Crew]:
    """Two workers."""
    with Crew(2, 64 * KIB) as crew:
        yield crew


def test_workers_run_no_code_of_the_directory_that_the_bench_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mmap.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    with Crew(1, 64 * KIB) as crew:
        assert crew.run(order(tmp_path, "access", threads=1)) > 0


def order(directory: Path, do: str, threads: int = 2) -> WorkOrder:
    """Four blocks of 64 KiB."""
    return WorkOrder(do, str(directory), "salt", blocks=4, size_bytes=64 * KIB, threads=threads)


def test_a_crew_shares_the_blocks_out_and_leaves_whole_ones(tmp_path: Path, crew: Crew) -> None:
    assert crew.run(order(tmp_path, "store")) > 0
    stored = sorted(tmp_path.iterdir())
    assert [path.stat().st_size for path in stored] == [64 * KIB] * 4
    assert all(path.name.endswith(".data") for path in stored)
    for do in ("load", "stat", "open_close", "delete", "access"):
        assert crew.run(order(tmp_path, do, threads=1)) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offset", [0, 64 * KIB - 1], ids=["first", "last"])
def test_one_wrong_byte_fails_the_run(tmp_path: Path, crew: Crew, offset: int) -> None:
    crew.run(order(tmp_path, "store"))
    victim = next(tmp_path.iterdir())
    with victim.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(BenchFailed, match="not what was stored"):
        crew.run(order(tmp_path, "load"))


def test_a_short_block_fails_the_run(tmp_path: Path, crew: Crew) -> None:
    crew.run(order(tmp_path, "store"))
    os.truncate(next(tmp_path.iterdir()), 64 * KIB - 1)
    with pytest.raises(BenchFailed, match="not what was stored"):
        crew.run(order(tmp_path, "load"))


def test_a_failing_call_fails_the_run(tmp_path: Path, crew: Crew) -> None:
    with pytest.raises(BenchFailed, match="No such file"):
        crew.run(order(tmp_path, "load"))


def test_a_name_that_should_be_absent_fails_the_run(tmp_path: Path, crew: Crew) -> None:
    crew.run(order(tmp_path, "store"))
    with pytest.raises(BenchFailed, match="never stored"):
        crew.run(order(tmp_path, "access"))


def test_filling_holes_keeps_the_bytes_and_allocates_the_rest(tmp_path: Path) -> None:
    images = [tmp_path / "one", tmp_path / "other"]
    for image, size_bytes in zip(images, (9 << 20, 5 << 20), strict=True):
        with image.open("wb") as file:
            file.seek(300 * KIB)
            file.write(b"data")
            file.truncate(size_bytes)
        assert image.stat().st_blocks * 512 < size_bytes
    before = [image.read_bytes() for image in images]
    steps = list[tuple[int, int]]()
    fill_holes(*images, filled=lambda *step: steps.append(step))
    assert [done for done, _ in steps] == [8 << 20, 13 << 20, 14 << 20]
    assert {total for _, total in steps} == {14 << 20}
    assert [image.read_bytes() for image in images] == before
    assert all(image.stat().st_blocks * 512 >= image.stat().st_size for image in images)
