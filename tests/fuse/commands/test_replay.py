"""`kvfs replay` on real mounts: a slice of the recorded trace, made whole and on one's own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.stepping import until
from tests.support.forks.process import Process, run
from tests.support.mounts.mounting import ROOT, Mounted, mounted_at, skip_without_mounts, workplace
from tests.support.store.trace import TRACE

pytestmark = pytest.mark.needs_fuse

#: 1,475 accesses to 1,400 blocks or so: more than a small cache holds.
SLICE = [str(TRACE), "--requests", "60", "--blocks-share", "10%", "--cleaner-interval", "1"]


def command(*flags: str) -> list[str]:
    """Return the command of a short replay."""
    return [sys.executable, "-m", "kvfs.cli.main", "replay", *SLICE, *flags]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory, empty again in the end."""
    skip_without_mounts()
    with workplace() as path:
        yield path


def check(report: dict[str, Any], sides: list[str]) -> None:
    """Check what holds for each side of any replay."""
    (only,) = report["rounds"]
    assert [side["name"] for side in only["sides"]] == sides
    asked = report["trace"]["accesses"]
    for side in only["sides"]:
        done = side["hits"] + side["present"] + side["stored"] + side["refused"]
        assert side["asked"] == done == asked
        assert 0 < side["hit_rate"] <= report["trace"]["best_hit_rate"]
        assert side["clients_cpu_s"] > 0 < side["server_cpu_s"]
        assert 0 < side["first_token_s"]["mean"] <= report["trace"]["computed_s"]["mean"] + 1
    assert only["sides"][0]["refused"] == 0  # kvfs: never full
    assert only["sides"][-1]["deleted"] > 0


@pytest.mark.needs_loop
def test_both_sides_are_made_and_taken_down(place: Path) -> None:
    for name in ("backing", "temporary"):
        (place / name).mkdir()
    done = run(
        command("--self-contained", "--backing", str(place / "backing"), "--direct", "--json", "-"),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(place / "temporary")},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check(report, ["kvfs, lru", "XFS, cleaned every 1 s"])
    for side in report["rounds"][0]["sides"]:
        assert side["written_bytes"] >= side["stored"] << 16
    assert "hit rate" in done.stderr
    assert [*(place / "backing").iterdir(), *(place / "temporary").iterdir()] == []
    assert str(place) not in Path("/proc/mounts").read_text()


@pytest.fixture
def mounts(place: Path) -> Iterator[list[str]]:
    """The flags for a mount and a file system of one's own."""
    (place / "pool").mkdir()
    with (
        Mounted(place / "pool", place / "kv", "--capacity", "16M") as mount,
        mounted_at(place / "plain", "-t", "tmpfs", "-o", "size=24M", "kvfs-test") as plain,
    ):
        yield ["--mount", str(mount.path), "--baseline", str(plain)]
        assert list(mount.path.iterdir()) == list(plain.iterdir()) == []


def test_blocks_are_scaled_to_ones_own_mount(mounts: list[str], place: Path) -> None:
    report_path = place / "report.json"
    done = run(
        command(*mounts, "--json", str(report_path), "--cleaner-by", "mtime"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(report_path.read_text())
    check(report, ["kvfs", "tmpfs, cleaned every 1 s"])
    (only,) = report["rounds"]
    assert only["blocks_share"] == pytest.approx(0.1, abs=0.005)
    assert only["block_bytes"] % 4096 == 0
    assert only["room_bytes"] == 16 << 20
    assert [side["written_bytes"] for side in only["sides"]] == [None, None]
    assert "hit rate" in done.stdout


def test_ctrl_c_leaves_nothing_behind(mounts: list[str]) -> None:
    plain = Path(mounts[-1])
    with Process(
        command(*mounts, "--speed", "4"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        until(lambda: any(plain.glob("*/*.data")), "a store beside the mount")
        running.send_signal(signal.SIGINT)
        assert "kvfs: interrupted" in running.stderr.read()
    assert running.returncode == 130


def test_a_baseline_that_is_too_small(mounts: list[str]) -> None:
    (Path(mounts[-1]) / "other").write_bytes(bytes(12 << 20))
    done = run(command(*mounts), cwd=ROOT, capture_output=True, text=True, check=False)
    (Path(mounts[-1]) / "other").unlink()
    assert done.returncode == 2
    assert "room for 16 MiB of blocks, " in done.stderr
    assert "smaller --capacity" in done.stderr
