"""A skip that docs/connectors/README.md does not list fails in CI; what is listed has a reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.connector import HERE, ROOT
from tests.connectors.skips import listed

SKIPPING = """\
import pytest

def test_a_new_one():
    pytest.skip("no reason that anybody wrote down")

def test_nixl_gds_cuda_backend():
    pytest.skip("this name is in the list")
"""


def test_what_is_listed_has_a_reason() -> None:
    assert len(listed()) > 5
    assert all(len(why.split()) >= 4 for why in listed().values())


@pytest.mark.parametrize(("ci", "failed"), [("true", 1), ("", 0)])
def test_a_new_skip_fails_in_ci(tmp_path: Path, ci: str, failed: int) -> None:
    """In a run of its own, with this directory's conftest."""
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == failed, done.stdout
    assert ("1 failed, 1 skipped" if failed else "2 skipped") in done.stdout
    assert ("not in docs/connectors/README.md's list" in done.stdout) == bool(failed)
