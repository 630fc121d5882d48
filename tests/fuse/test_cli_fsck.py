"""``kvfs fsck``: what it prints and how it ends; what it finds is tests/engine's business."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvfs.cli.main import main
from kvfs.devices import Device
from kvfs.errors import CheckFailed
from tests.support.mounting import run_kvfs, workplace

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Report(NamedTuple):
    problems: list[str]
    repaired: int
    blocks: int
    directories: int


@pytest.fixture
def pool() -> Iterator[Path]:
    with workplace() as directory:
        (directory / "pool").mkdir()
        run_kvfs("mkfs", str(directory / "pool"))
        yield directory / "pool"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[Report], list[bool]]:
    """Let the check find a report; the list tells with which ``repair`` it was called."""

    def find(report: Report) -> list[bool]:
        calls: list[bool] = []

        def check_pool(
            device: Device, *, repair: bool, progress: Callable[[int, int], None]
        ) -> Report:
            assert device.pool_fd >= 0
            assert device.read_only is not repair
            progress(1, 2)
            calls.append(repair)
            return report

        monkeypatch.setattr("kvfs.recovery.check_pool", check_pool, raising=False)
        return calls

    return find


def test_a_sound_pool_ends_with_0(
    pool: Path, found: Callable[[Report], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = found(Report([], 0, 3, 2))
    assert main(["fsck", str(pool)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{pool}: 3 blocks, 2 directories, no problem\n"
    assert captured.err == ""
    assert calls == [False]


def test_damage_is_listed_and_ends_with_its_own_exit_code(
    pool: Path, found: Callable[[Report], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    found(Report(["extent 10 has no identity", "name a leads nowhere"], 0, 3, 2))
    assert main(["fsck", str(pool)]) == CheckFailed.exit_code
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "extent 10 has no identity",
        "name a leads nowhere",
        f"{pool}: 3 blocks, 2 directories, 2 problems, 0 repaired",
    ]
    assert captured.err == (f"kvfs: {pool}: 2 problems; `kvfs fsck {pool} --repair` repairs them\n")


def test_a_repair_ends_with_0_and_says_what_it_did(
    pool: Path, found: Callable[[Report], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = found(Report(["name a leads nowhere"], 1, 3, 2))
    assert main(["fsck", str(pool), "--repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "source": str(pool),
        "problems": ["name a leads nowhere"],
        "repaired": 1,
        "blocks": 3,
        "directories": 2,
    }
    assert calls == [True]


def test_what_could_not_be_repaired_is_no_success(
    pool: Path, found: Callable[[Report], list[bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    found(Report(["one", "two"], 1, 3, 2))
    assert main(["fsck", str(pool), "--repair"]) == CheckFailed.exit_code
    assert capsys.readouterr().err == f"kvfs: {pool}: 1 of 2 problems could not be repaired\n"
