"""``kvfs fsck``: what it prints and how it ends; what it finds is tests/engine's business."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.cli.main import main
from kvfs.core.errors import (
    CheckFailed,
    NoSpace,
    SourceBlank,
    SourceDamaged,
    SourceForeign,
    SourceFull,
)
from kvfs.devices import Device
from kvfs.engine.recovery.fsck_rows import FsckReport
from tests.support.mounts.mounting import Mounted, run_kvfs, workplace

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def report_of(problems: list[str], repaired: int) -> FsckReport:
    """Return a report of a pool with 3 blocks in 2 directories."""
    report = FsckReport()
    for problem in problems:
        report.problem(problem)
    report.repaired, report.blocks, report.directories = repaired, 3, 2
    return report


@pytest.fixture
def pool() -> Iterator[Path]:
    with workplace() as directory:
        (directory / "pool").mkdir()
        run_kvfs("mkfs", str(directory / "pool"))
        yield directory / "pool"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[FsckReport], list[bool]]:
    """Let the check find a report; the list tells with which ``repair`` it was called."""

    def find(report: FsckReport) -> list[bool]:
        calls: list[bool] = []

        def check_pool(
            device: Device, *, repair: bool, progress: Callable[[int, int], None]
        ) -> FsckReport:
            assert device.pool_fd >= 0
            assert device.read_only is not repair
            progress(1, 2)
            calls.append(repair)
            return report

        monkeypatch.setattr("kvfs.engine.recovery.fsck.check_pool", check_pool)
        return calls

    return find


def test_a_sound_pool_ends_with_0(
    pool: Path, found: Callable[[FsckReport], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = found(report_of([], 0))
    assert main(["fsck", str(pool)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{pool}: 3 blocks, 2 directories, no problem\n"
    assert captured.err == ""
    assert calls == [False]


def test_damage_is_listed_and_ends_with_its_own_exit_code(
    pool: Path, found: Callable[[FsckReport], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    found(report_of(["extent 10 has no identity", "name a leads nowhere"], 0))
    assert main(["fsck", str(pool)]) == CheckFailed.exit_code
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "extent 10 has no identity",
        "name a leads nowhere",
        f"{pool}: 3 blocks, 2 directories, 2 problems, 0 repaired",
    ]
    assert captured.err == (f"kvfs: {pool}: 2 problems; `kvfs fsck {pool} --repair` repairs them\n")


def test_a_repair_ends_with_0_and_says_what_it_did(
    pool: Path, found: Callable[[FsckReport], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = found(report_of(["name a leads nowhere"], 1))
    assert main(["fsck", str(pool), "--repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "source": str(pool),
        "problems": ["name a leads nowhere"],
        "found": 1,
        "repaired": 1,
        "blocks": 3,
        "directories": 2,
        "quarantined": {},
        "strays": {},
        "missing_drives": {},
        "unchecked": 0,
    }
    assert calls == [True]


def test_what_could_not_be_repaired_is_no_success(
    pool: Path, found: Callable[[FsckReport], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    found(report_of(["one", "two"], 1))
    assert main(["fsck", str(pool), "--repair"]) == CheckFailed.exit_code
    assert capsys.readouterr().err == f"kvfs: {pool}: 1 of 2 problems could not be repaired\n"


@pytest.mark.parametrize(
    ("failure", "exit_code", "said"),
    [
        (OSError(5, "Input/output error"), SourceDamaged.exit_code, "Input/output error"),
        (NoSpace("the map is full"), SourceFull.exit_code, "no space for the repair"),
        (OSError(errno.ENOSPC, "full"), SourceFull.exit_code, "no space for the repair"),
    ],
)
def test_a_check_that_fails_is_one_line(
    pool: Path,
    failure: Exception,
    exit_code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def check_pool(*_: object, **__: object) -> FsckReport:
        raise failure

    monkeypatch.setattr("kvfs.engine.recovery.fsck.check_pool", check_pool)
    assert main(["fsck", str(pool), "--repair"]) == exit_code
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kvfs: {pool}: ")
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.needs_fuse
def test_a_real_pool_is_checked_and_its_index_rebuilt(pool: Path) -> None:
    mountpoint = pool.parent / "kv"
    with Mounted(pool, mountpoint) as mount:
        (mountpoint / "deep").mkdir()
        (mountpoint / "draft").write_bytes(b"kept" * 5000)
        (mountpoint / "draft").rename(mountpoint / "deep" / "block")
        mount.stop()
        assert run_kvfs("fsck", str(pool)).stdout == (
            f"{pool}: 1 block, 2 directories, no problem\n"
        )
        with (pool / "log" / "copy.0").open("r+b") as file:
            file.write(os.urandom(65536))
        result = run_kvfs("fsck", str(pool), check=False)
        assert result.returncode == CheckFailed.exit_code
        assert "`kvfs fsck" in result.stderr
        run_kvfs("fsck", str(pool), "--repair")
        run_kvfs("fsck", str(pool))
        mount.start()
        assert (mountpoint / "deep" / "block").read_bytes() == b"kept" * 5000


def test_a_directory_in_the_locks_place_is_one_line(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pool / "LOCK").unlink()
    (pool / "LOCK").mkdir()
    assert main(["fsck", str(pool), "--repair"]) == SourceForeign.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvfs: {pool}: its LOCK is not a file; remove it")


@pytest.mark.parametrize("verb", [("fsck",), ("fsck", "--repair"), ("destroy", "--yes")])
def test_what_is_no_pool_is_named_and_left_alone(
    verb: tuple[str, ...], pool: Path, tmp_path: Path
) -> None:
    """No word of how to make a pool of it: who asks for a check or a removal wants none."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").write_text("years of work")
    (tmp_path / "blank").write_bytes(bytes(1 << 20))
    (tmp_path / "notes").write_text("more work\n" * 1000)
    for name, what, error in (
        ("empty", "it is empty", SourceBlank),
        ("work", "and not empty: thesis", SourceForeign),
        ("blank", "it is blank", SourceBlank),
        ("notes", "", SourceForeign),
    ):
        path = tmp_path / name
        done = run_kvfs(verb[0], str(path), *verb[1:], check=False)
        assert done.returncode == error.exit_code, done.stderr
        assert f"{path} is not a kvfs pool" in done.stderr
        assert what in done.stderr
        assert "mkfs" not in done.stderr
        assert "--force" not in done.stderr
        assert "give an empty" not in done.stderr
    assert (tmp_path / "work" / "thesis").read_text() == "years of work"
    with Mounted(pool, pool.parent / "kv") as mounted:
        done = run_kvfs(verb[0], str(mounted.path), *verb[1:], check=False)
        assert done.returncode == SourceForeign.exit_code
        assert done.stderr == (
            f"kvfs: {mounted.path} is a mountpoint, not a pool: "
            f"give the source of the mount, {pool}\n"
        )
