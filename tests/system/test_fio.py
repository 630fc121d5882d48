"""fio with CRC32C in every unit of data, in every way that fio knows to read and write a file.

On a pool on its own XFS, as on a drive. What was written is verified by the run that wrote it,
and once more after a new mount, when neither kernel nor server remember anything.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.devices.loop import loop_device
from tests.support.mounts.mounting import Mounted, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

DRIVE_BYTES: Final = 2 << 30
#: Generous for two shared cores: a run takes a second.
WAIT_S: Final = 240.0
#: Of one file, by data path: on the daemon's each 4 KiB is a message.
LARGE_MIB: Final = {"passthrough": 256, "daemon": 32}
#: Behind each name what fio is asked for; see fio(1).
WAYS: Final = {
    "buffered-sequential": ["--rw=write", "--bs=1m"],
    "buffered-random": ["--rw=randwrite", "--bs=4k"],
    "buffered-mixed": ["--rw=randrw", "--bs=16k", "--rwmixread=40"],
    "odd-sizes": ["--rw=write", "--bsrange=600-70001", "--bs_unaligned=1"],
    "odd-sizes-random": ["--rw=randwrite", "--bsrange=600-70001", "--bs_unaligned=1"],
    "direct-sequential": ["--rw=write", "--bs=1m", "--direct=1"],
    "direct-random": ["--rw=randwrite", "--bs=4k", "--direct=1"],
    "direct-odd": ["--rw=randwrite", "--bsrange=4k-512k", "--direct=1"],
    "libaio": ["--rw=randwrite", "--bs=8k", "--direct=1", "--ioengine=libaio", "--iodepth=16"],
    "libaio-buffered": ["--rw=randwrite", "--bs=8k", "--ioengine=libaio", "--iodepth=16"],
    "io_uring": ["--rw=randwrite", "--bs=8k", "--direct=1", "--ioengine=io_uring", "--iodepth=16"],
    "io_uring-buffered": ["--rw=write", "--bs=64k", "--ioengine=io_uring", "--iodepth=16"],
    "mmap": ["--rw=randwrite", "--bs=4k", "--ioengine=mmap"],
    "splice": ["--rw=write", "--bs=64k", "--ioengine=splice"],
    "append": ["--rw=write", "--bs=32k", "--file_append=1"],
    "fallocated": ["--rw=randwrite", "--bs=32k", "--fallocate=posix"],
}
#: Four processes, each with its quarter of one file.
SHARED: Final = {
    "four-buffered": ["--rw=randwrite", "--bs=4k"],
    "four-direct": ["--rw=randwrite", "--bs=4k", "--direct=1"],
    "four-libaio": ["--rw=randwrite", "--bs=4k", "--direct=1", "--ioengine=libaio", "--iodepth=8"],
    # No mmap: with an offset fio 3.33 maps another place than it verifies, on ext4 as well.
}


@pytest.fixture(scope="module", params=["passthrough", "daemon"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A pool on an XFS of its own."""
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    with (
        workplace("disk") as directory,
        loop_device(DRIVE_BYTES) as drive,
        Mounted(drive.path, directory / "kv", f"--data-path={request.param}") as mount,
    ):
        if request.param == "passthrough":
            require_passthrough(mount)
        yield mount
        mount.stop()
        assert not mount.errors()


def data_path_of(mount: Mounted) -> str:
    """Return which path the mount was made for."""
    return mount.flags[-1].removeprefix("--data-path=")


def fio(path: Path, *flags: str) -> int:
    """Run fio on the file *path* and return how many bytes it read back and verified."""
    command = [
        "fio",
        "--name=verify",
        f"--filename={path}",
        *("--verify=crc32c", "--verify_fatal=1", "--randseed=7", "--group_reporting"),
        *("--verify_state_save=0", "--output-format=json"),
        *flags,
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=path.parent.parent, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [job] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert job["error"] == 0
    return int(job["read"]["io_bytes"])


def check(mount: Mounted, name: str, flags: list[str], size_mib: int) -> None:
    """Write, verify, mount anew and verify again.

    fio finds what it wrote by the same random numbers, but neither in a mixed run nor in one that
    appends.
    """
    path = mount.path / name
    size = f"--size={size_mib}m"
    assert fio(path, size, *flags) > 0
    if not {"--rw=randrw", "--file_append=1"}.intersection(flags):
        mount.remount()
        assert fio(path, size, *flags, "--verify_only") > 0
    path.unlink()


def parts(way: str, size_mib: int) -> list[str]:
    """Return the flags that give each of four processes *size_mib* of the file."""
    return ["--numjobs=4", f"--offset_increment={size_mib}m", *SHARED[way]]


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_comes_back(mount: Mounted, way: str) -> None:
    if data_path_of(mount) == "daemon":
        assert fio(mount.path / way, "--size=4m", *WAYS[way]) > 0
    else:
        check(mount, way, WAYS[way], 16)


@pytest.mark.parametrize("way", SHARED)
def test_four_processes_on_one_file(mount: Mounted, way: str) -> None:
    if data_path_of(mount) == "daemon":
        assert fio(mount.path / way, "--size=1m", *parts(way, 1)) > 0
    else:
        check(mount, way, parts(way, 4), 4)


@pytest.mark.proof
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_of_a_large_file_comes_back(mount: Mounted, way: str) -> None:
    check(mount, way, WAYS[way], LARGE_MIB[data_path_of(mount)])


@pytest.mark.proof
@pytest.mark.parametrize("way", SHARED)
def test_four_processes_on_one_large_file(mount: Mounted, way: str) -> None:
    size_mib = LARGE_MIB[data_path_of(mount)] // 4
    check(mount, way, parts(way, size_mib), size_mib)
