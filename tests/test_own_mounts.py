"""The tests' mounts are theirs alone: containers beside them neither see nor keep one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.mounts.mounting import ROOT, mounted_at, skip_without_mounts, wait_gone

pytestmark = pytest.mark.needs_fuse

#: Makes a mount as a process with tests does, and unmounts it when it may.
_PROGRAM: Final = """
import subprocess, sys
from tests.support.machines.own_mounts import enter_own_mounts
enter_own_mounts()
subprocess.run(["mount", "-t", "tmpfs", "kvfs-test", sys.argv[1]], check=True)
print(open("/proc/self/mountinfo").read().count(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def copied_by_a_container() -> str:
    container = ["unshare", "--mount", "--propagation", "private", "cat", "/proc/self/mountinfo"]
    return subprocess.run(container, check=True, capture_output=True, text=True).stdout


def test_a_container_copies_no_mount_of_a_process_with_tests(tmp_path: Path) -> None:
    skip_without_mounts()
    place = tmp_path / "theirs"
    place.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == "1\n"
        assert str(place) not in copied_by_a_container()
        assert not os.path.ismount(place)
        with mounted_at(tmp_path / "ours", "-t", "tmpfs", "kvfs-test") as ours:
            assert str(ours) in copied_by_a_container()


def test_a_killed_process_with_tests_leaves_nobody_in_its_namespace() -> None:
    skip_without_mounts()
    program = (
        "import subprocess\n"
        "from tests.support.machines.own_mounts import enter_own_mounts\n"
        "enter_own_mounts()\n"
        "print(subprocess.Popen(['sleep', '3600'], start_new_session=True).pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        left = int(tests.stdout.readline())
        pidfd = os.pidfd_open(left)
        try:
            tests.kill()
            wait_gone(left, pidfd)
        finally:
            os.close(pidfd)
