"""The projects' own tests of these backends, from their sdists, in a directory on the mount.

What they make with pytest's ``tmp_path`` and with ``tempfile`` lies there.
"""

import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import ClassVar, Final

import pytest

from tests.connectors.connector import DRIVERS, environment
from tests.connectors.skips import listed
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.connectors

RUN_WAIT_S: Final = 280.0

LMCACHE: Final = (
    "tests/v1/distributed/test_fs_l2_adapter_delete.py",
    "tests/v1/distributed/test_nixl_store_dynamic_l2_adapter.py",
    "tests/v1/distributed/test_nixl_store_l2_adapter.py",
    "tests/v1/storage_backend/test_fs_connector.py",
    "tests/v1/storage_backend/test_fs_native_connector.py",
    "tests/v1/storage_backend/test_local_disk_backend.py",
    "tests/v1/storage_backend/test_local_disk_put_admission.py",
    "tests/v1/test_nixl_storage.py",
)
LMCACHE_ELSEWHERE: Final = "test_nixl_posix_backend_multipath"
"""Its directories are written into it; none can be on the mount."""
VLLM: Final = ("tests/v1/kv_offload/tiering/test_fs_tier.py",)


def run_own(
    python: Path, project: str, files: tuple[str, ...], directory: Path, *options: str
) -> dict[str, str]:
    """Run a project's tests with their files in ``directory``; the outcome of each, by name."""
    report = directory / "report.xml"
    root = python.parent.parent / "own-tests" / project
    unpacked = environment(python)["PYTHONPATH"]
    # vLLM's want the engine around the tier; LMCache's are told by vLLM's absence what to skip.
    engine = [f"{unpacked}/engine"] if project == "vllm" else []
    # Without one of its own pytest would take ours, of the tree that the interpreter lies in.
    settings = root / "pyproject.toml"
    (directory / "tmp").mkdir()
    done = subprocess.run(
        [
            *(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "own_tests"),
            *("-c", str(settings) if settings.exists() else os.devnull, "--rootdir", "."),
            *(f"--basetemp={directory}/base", f"--junit-xml={report}"),
            *options,
            *files,
        ],
        cwd=root,
        env={
            **environment(python),
            "PYTHONPATH": ":".join([*engine, unpacked, str(DRIVERS)]),
            "VLLM_TARGET_DEVICE": "cpu",
            "TMPDIR": f"{directory}/tmp",
        },
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=RUN_WAIT_S,
        text=True,
        check=False,
    )
    assert report.exists(), f"{done.stdout}\n{done.stderr}"
    cases = ET.parse(report).getroot().iter("testcase")
    outcomes = {f"{case.get('classname')}::{case.get('name')}": outcome_of(case) for case in cases}
    report.unlink()
    return outcomes


def outcome_of(case: ET.Element) -> str:
    """Say ``passed``, ``skipped``, or what failed."""
    for child in case:
        if child.tag in ("failure", "error"):
            return f"{child.tag}: {child.get('message')}"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


class TestProjectsOwn:
    """One mount for both projects."""

    data_path: ClassVar[str] = "auto"

    def passes(self, mount: Mounted | Reference, outcomes: dict[str, str], passed_min: int) -> None:
        """All that is not in the list of skips has passed, and it was on the mount."""
        failed = {
            name: said for name, said in outcomes.items() if said not in ("passed", "skipped")
        }
        assert failed == {}
        skipped = {name.rpartition("::")[2] for name, said in outcomes.items() if said == "skipped"}
        assert skipped <= set(listed()), "say in docs/connectors/README.md why these are skipped"
        assert list(outcomes.values()).count("passed") >= passed_min
        if isinstance(mount, Mounted):
            assert mount.requests()["CREATE"] >= passed_min // 4

    def test_lmcache(
        self, connectors_python: Path, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        assert LMCACHE_ELSEWHERE in listed()
        options = ("-p", "lmcache_small", f"--deselect={LMCACHE[-1]}::{LMCACHE_ELSEWHERE}")
        outcomes = run_own(connectors_python, "lmcache", LMCACHE, kv_dir, *options)
        assert any(name.endswith("::test_nixl_posix_backend") for name in outcomes)
        self.passes(mount, outcomes, 164)

    def test_vllm(self, connectors_python: Path, mount: Mounted | Reference, kv_dir: Path) -> None:
        outcomes = run_own(connectors_python, "vllm", VLLM, kv_dir)
        self.passes(mount, outcomes, 45)
