"""In CI a test is skipped for a reason of the list, or it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mounts.mounting import ROOT

TESTS = """
import pytest

def test_listed():
    pytest.skip("takes a path")

def test_not_listed():
    pytest.skip("it did not work here")

@pytest.mark.skip(reason="nobody knows")
def test_marked():
    pass
"""


@pytest.mark.parametrize(("ci", "fails"), [("true", True), ("", False)])
def test_a_skip_fails_in_ci_if_its_reason_is_not_listed(
    ci: str, fails: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"{tmp_path}/test_some.py"],
        cwd=ROOT,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == fails, done.stdout
    counts = "1 failed, 1 skipped, 1 error" if fails else "3 skipped"
    assert counts in done.stdout, done.stdout
    assert ("in CI nothing is skipped for this reason" in done.stdout) == fails
