"""`make test` looks at a few failed tests once more, and at many not."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from make.second_look import AGAIN_MAX, TESTS_FAILED
from tests.support.mounts.mounting import ROOT

PYTEST: Final = str(Path(sys.executable).with_name("pytest"))
#: A test that fails until it was run so often.
UNTIL: Final = """\
from pathlib import Path

def test_{name}():
    with open("{name}.runs", "a") as file:
        file.write(".")
    assert len(Path("{name}.runs").read_text()) > {failures}
"""


def looked(place: Path, failures: dict[str, int], *flags: str) -> subprocess.CompletedProcess[str]:
    """Run tests by that name which fail so often; return how it ended."""
    for name, count in failures.items():
        (place / f"test_{name}.py").write_text(UNTIL.format(name=name, failures=count))
    command = [sys.executable, "-m", "make.second_look", PYTEST, "-q", "-n", "2", *flags]
    run = subprocess.run(
        command,
        cwd=place,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not run.stderr
    return run


def runs(place: Path, name: str) -> int:
    """How often the test of that name was run."""
    return len((place / f"{name}.runs").read_text())


def test_one_that_passes_by_itself_is_named(tmp_path: Path) -> None:
    run = looked(tmp_path, {"sound": 0, "unlucky": 1})
    assert run.returncode == 0
    assert "FAILED beside others, passed by themselves: test_unlucky.py::" in run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert (runs(tmp_path, "sound"), runs(tmp_path, "unlucky")) == (1, 2)


def test_one_that_fails_again_fails_the_suite(tmp_path: Path) -> None:
    run = looked(tmp_path, {"wrong": 2, "unlucky": 1})
    assert run.returncode == TESTS_FAILED
    assert "FAILED beside others, failed again: test_wrong.py::" in run.stdout
    assert runs(tmp_path, "wrong") == 2


def test_many_are_not_run_again(tmp_path: Path) -> None:
    names = [f"unlucky{number}" for number in range(AGAIN_MAX + 1)]
    run = looked(tmp_path, dict.fromkeys(names, 1))
    assert run.returncode == TESTS_FAILED
    assert f"{AGAIN_MAX + 1} tests failed" in run.stdout
    assert [runs(tmp_path, name) for name in names] == [1] * len(names)


def test_former_failures_are_forgotten(tmp_path: Path) -> None:
    assert looked(tmp_path, {"unlucky": 9}).returncode == TESTS_FAILED
    (tmp_path / "test_unlucky.py").unlink()
    assert looked(tmp_path, {"sound": 0}).returncode == 0
    assert runs(tmp_path, "sound") == 1


@pytest.mark.parametrize("flags", [["--no-such-option"], ["no_such_file.py"]])
def test_what_is_no_failed_test_is_not_repeated(tmp_path: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "make.second_look", PYTEST, *flags]
    run = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert run.returncode > TESTS_FAILED
    assert b"once more" not in run.stdout
