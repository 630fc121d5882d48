"""A proof, run by ``make proof``: suites that others wrote, as Debian packages, on both data paths.

CPython's own tests of files run on a native XFS first: what passes there must pass on kvfs, but for
what docs/semantics.md declares. stress-ng's stressors verify what they read themselves. fio has a
file of its own (test_fio.py). pjdfstest, fsx and xfstests are in no package registry.
"""

import os
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.devices.loop import loop_device
from tests.support.mounts.mounting import Mounted, mounted_at, workplace

pytestmark = [pytest.mark.proof, pytest.mark.needs_fuse, pytest.mark.needs_loop]

DRIVE_BYTES: Final = 4 << 30
WAIT_S: Final = 900.0
#: Debian's Python, which the package with the tests belongs to.
PYTHON: Final = "/usr/bin/python3"
#: CPython's tests that make files where TMPDIR says.
MODULES: Final = (
    *("test_bufio", "test_bz2", "test_dbm_dumb", "test_fcntl", "test_file", "test_file_eintr"),
    *("test_filecmp", "test_fileinput", "test_fileio", "test_genericpath", "test_glob"),
    *("test_gzip", "test_io", "test_largefile", "test_lzma", "test_mailbox", "test_mmap"),
    *("test_os", "test_pathlib", "test_posix", "test_posixpath", "test_shelve", "test_shutil"),
    *("test_tarfile", "test_tempfile", "test_unicode_file"),
    *("test_unicode_file_functions", "test_zipfile"),
)
#: A suite that ran less than this did not run.
CASES_MIN: Final = 3000
#: docs/semantics.md: a file has two names at most, and it gives one three.
DECLARED: Final = frozenset({"test_hardlink_to", "test_link_to"})

#: Behind each stressor its bounds; see stress-ng(1).
STRESSORS: Final = {
    "aio": ["--aio-ops=500"],
    "copy-file": ["--copy-file-ops=20", "--copy-file-bytes=128m"],
    "dentry": ["--dentry-ops=4000"],
    "dir": ["--dir-ops=2000"],
    "dirdeep": ["--dirdeep-ops=500", "--dirdeep-inodes=500"],
    "fallocate": ["--fallocate-ops=200", "--fallocate-bytes=64m"],
    "filename": ["--filename-ops=2000"],
    "flock": ["--flock-ops=5000"],
    "fpunch": ["--fpunch-ops=50"],
    "hdd": ["--hdd-ops=4000", "--hdd-bytes=128m"],
    "io-uring": ["--io-uring-ops=2000"],
    "iomix": ["--iomix-ops=4000", "--iomix-bytes=64m"],
    "lease": ["--lease-ops=200"],
    "lockf": ["--lockf-ops=5000"],
    "open": ["--open-ops=5000"],
    "readahead": ["--readahead-ops=500", "--readahead-bytes=64m"],
    "rename": ["--rename-ops=10000"],
    "revio": ["--revio-ops=4000", "--revio-bytes=64m"],
    "seek": ["--seek-ops=5000", "--seek-size=64m"],
    "sendfile": ["--sendfile-ops=500"],
    "symlink": ["--symlink-ops=10"],
    "sync-file": ["--sync-file-ops=50", "--sync-file-bytes=64m"],
    "touch": ["--touch-ops=10000"],
    "utime": ["--utime-ops=10000"],
    "xattr": ["--xattr-ops=500"],
}
STRESS_S: Final = 60


@pytest.fixture(scope="module", params=["passthrough", "daemon"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A pool on a drive of its own."""
    with (
        workplace("disk") as directory,
        loop_device(DRIVE_BYTES) as drive,
        Mounted(drive.path, directory / "kv", f"--data-path={request.param}") as mounted,
    ):
        if request.param == "passthrough":
            require_passthrough(mounted)
        yield mounted
        mounted.stop()
        assert not mounted.errors()


@pytest.fixture(scope="module")
def on_xfs() -> frozenset[str]:
    """The cases that fail on a native XFS of this machine: not the file system's doing."""
    with workplace("disk") as directory, loop_device(DRIVE_BYTES) as drive:
        subprocess.run(["mkfs.xfs", "-q", drive.path], check=True)
        with mounted_at(directory / "native", drive.path) as native:
            return cpython(native)


def cpython(place: Path) -> frozenset[str]:
    """Run CPython's tests of files with their files in *place*; return those that failed."""
    work = place / "cpython"
    work.mkdir()
    with workplace("disk") as results:
        report = results / "junit.xml"
        ran = subprocess.run(
            [PYTHON, "-m", "test", "--tempdir", work, "--junit-xml", report, *MODULES],
            cwd=work,
            env={**os.environ, "TMPDIR": str(work)},
            check=False,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert report.exists(), ran.stdout[-4000:] + ran.stderr[-2000:]
        cases = list(ET.parse(report).getroot().iter("testcase"))
    assert len(cases) > CASES_MIN, f"{len(cases)} cases ran\n{ran.stdout[-4000:]}"
    print(f"CPython: {len(cases)} cases in {place.name}")
    return frozenset(
        str(case.get("name"))
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )


def test_cpythons_own_tests_of_files_pass(mount: Mounted, on_xfs: frozenset[str]) -> None:
    failed = {name for name in cpython(mount.path) if name.rpartition(".")[2] not in DECLARED}
    assert failed <= on_xfs, f"pass on XFS and fail on kvfs: {sorted(failed - on_xfs)}"


@pytest.mark.parametrize("stressor", STRESSORS)
def test_what_stressors_read_is_what_they_wrote(mount: Mounted, stressor: str) -> None:
    work = mount.path / f"stress-{stressor}"
    work.mkdir()
    ran = subprocess.run(
        [
            "stress-ng",
            # Relative: the io-uring stressor fails on an absolute path, on ext4 as well.
            *("--temp-path", ".", "--verify", "--timeout", str(STRESS_S)),
            *(f"--{stressor}=2", *STRESSORS[stressor]),
        ],
        cwd=work,
        check=False,
        capture_output=True,
        text=True,
        timeout=STRESS_S * 3,
    )
    told = ran.stdout + ran.stderr
    # stress-ng(1): 0 is success, 4 what this machine does not have.
    assert ran.returncode == 0, f"exit {ran.returncode}\n{told[-3000:]}"
    assert "successful run completed" in told
    assert mount.status()["server_pid"] == mount.server_pid
