"""Where ``kvfs mount`` is called, and which mountpoints it refuses: exit code 7, nothing hidden."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core import errors
from tests.support.mounts.mounting import ROOT, run_kvfs
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse

#: So that what a mount would hide is hidden from nobody else.
ALONE: Final = ("unshare", "--mount", "--propagation=private")
#: As a shell finds the installed command: the working directory is on no path.
INSTALLED: Final = f"PYTHONPATH={ROOT} exec {sys.executable} -P -m kvfs.cli.main"


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def by_shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run *script*, whose last command is ours."""
    with open(os.devnull, "w+b") as nothing:
        return subprocess.run(
            ["sh", "-c", script], stdin=nothing, capture_output=True, text=True, check=False
        )


def test_a_shell_below_a_dead_mount_mounts_again(place: Path) -> None:
    """What is not set is no path: it must not become the working directory."""
    with small_mount(place) as mount:
        (mount.path / "model").mkdir()
        shell = subprocess.Popen(
            ["sh"], stdin=subprocess.PIPE, cwd=mount.path / "model", stderr=subprocess.PIPE
        )
        mount.kill()
        again = f"{INSTALLED} mount {mount.source} {mount.path} --log-file={mount.log_file}"
        said = shell.communicate(f"{again} >{place}/said\n".encode())[1].decode()
        assert shell.returncode == 0, said
        assert said == f"kvfs: replaces a dead mount of {mount.source} at {mount.path}\n"
        mount.adopt()


@pytest.mark.parametrize("gone", [True, False])
def test_a_working_directory_says_nothing_of_absolute_paths(place: Path, gone: bool) -> None:
    with small_mount(place) as mount:
        mount.stop()
        (place / "shell").mkdir()
        here = f"cd {place}/shell; {'rmdir' if gone else 'ls'} {place}/shell"
        done = by_shell(
            f"{here}; {INSTALLED} mount {mount.source} {mount.path} --log-file={mount.log_file}"
            f" 2>{place}/said"
        )
        assert done.returncode == 0, (place / "said").read_text()
        mount.adopt()


@pytest.mark.parametrize(
    "mountpoint", ["/", "/etc", "/run", "/run/kvfs", "/usr", "/var", "/proc", "/dev", "/sys"]
)
def test_what_the_server_needs_is_not_hidden(place: Path, mountpoint: str) -> None:
    done = run_kvfs("mount", str(place / "pool"), mountpoint, prefix=ALONE, check=False)
    assert done.returncode == errors.MountpointUnusable.exit_code, done.stderr
    assert done.stderr.startswith(
        f"kvfs: mountpoint {mountpoint} cannot be used: a mount would hide "
    )
    assert os.listdir(place / "pool") == []


def test_a_log_is_not_on_the_mount_itself(place: Path) -> None:
    log = f"--log-file={place}/kv/log"
    done = run_kvfs("mount", str(place / "pool"), str(place / "kv"), log, check=False)
    assert done.returncode == errors.MountpointUnusable.exit_code, done.stderr
    assert f"would hide {place}/kv/log" in done.stderr
    assert os.listdir(place / "kv") == []


@pytest.mark.parametrize(
    ("mountpoint", "fs_type"),
    [("/proc/self/task", "proc"), ("/sys/fs", "sysfs"), ("/dev/pts", "devpts")],
)
def test_what_the_kernel_makes_is_no_place(place: Path, mountpoint: str, fs_type: str) -> None:
    done = run_kvfs("mount", str(place / "pool"), mountpoint, prefix=ALONE, check=False)
    assert done.returncode == errors.MountpointUnusable.exit_code, done.stderr
    assert f" lies on a file system of type {fs_type}, whose files the kernel makes" in done.stderr
    assert os.listdir(place / "pool") == []
