"""The device below is gone: clients get misses, or one errno at once, and the log says why."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.errors import SourceBusy, SourceDamaged
from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive, mounted_on
from tests.support.devices.failing_drive_program import Fails
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

COUNT = 300
DATA = b"w" * 9000
#: Of a mount whose server has ended.
ENDED = {errno.ENOTCONN, errno.ECONNABORTED}


@pytest.fixture(params=["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest, drive: FailingDrive) -> Iterator[Mounted]:
    """A pool on the drive with some blocks, durable."""
    with mounted_on(drive, request.param) as mount:
        for number in range(COUNT):
            (mount.path / f"{number}.tmp").write_bytes(DATA)
            os.rename(mount.path / f"{number}.tmp", mount.path / f"{number}")
        drive.write_back()
        yield mount


def load(path: Path) -> int:
    """Return the errno of a load, 0 for a whole block."""
    try:
        assert path.read_bytes() == DATA
    except OSError as error:
        return error.errno or -1
    return 0


def store(path: Path) -> int:
    try:
        path.write_bytes(DATA)
    except OSError as error:
        return error.errno or -1
    return 0


def test_a_lost_device_is_misses_and_refused_stores(mounted: Mounted, drive: FailingDrive) -> None:
    """[device-lost] XFS shuts itself down when it cannot write its log."""
    kept = (mounted.path / "0").open("rb")
    drive.fail(reads=Fails.ALL, writes=Fails.ALL)
    store(mounted.path / "new")
    drive.write_back()
    until(lambda: "device_lost" in mounted.status(), "the server finds out")
    found = {load(mounted.path / f"{number}") for number in range(COUNT)}
    assert found == {errno.ENOENT}
    assert {store(mounted.path / f"new{number}") for number in range(20)} == {errno.EIO}
    assert os.listdir(mounted.path) == []
    assert os.stat(mounted.path).st_ino == 1
    assert os.statvfs(mounted.path).f_bfree == 0
    with pytest.raises(OSError, match="Input/output error"):
        (mounted.path / "directory").mkdir()
    kept.close()
    assert any(f"{drive.path} is lost: " in line for line in mounted.errors())
    assert "lost" in run_kvfs("status", str(mounted.path)).stdout
    refused = run_kvfs("evict", "--all", str(mounted.path), check=False)
    assert refused.returncode != 0
    report = run_kvfs("doctor", str(mounted.path), check=False)
    assert "is lost" in report.stdout
    assert os.path.exists(f"/proc/{mounted.server_pid}")
    drive.recover()
    mounted.remount()
    assert {load(mounted.path / f"{number}") for number in range(COUNT)} <= {0, errno.ENOENT}
    assert store(mounted.path / "again") == 0


@pytest.mark.drops_caches
def test_an_index_that_cannot_be_read_ends_nothing(mounted: Mounted, drive: FailingDrive) -> None:
    """[device-lost] Its pages come from the device when they are not in memory: SIGBUS."""
    drive.fail(reads=Fails.ALL)
    found: set[int] = set()

    def is_lost() -> bool:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        found.update(load(mounted.path / f"{number}") for number in range(0, COUNT, 7))
        return "device_lost" in mounted.status()

    until(is_lost, "the server finds out")
    assert found <= {0, errno.EIO, errno.ESTALE, errno.ENOENT}
    assert {load(mounted.path / f"{number}") for number in range(COUNT)} == {errno.ENOENT}
    # XFS may find its own metadata unreadable, or its log unwritable, before a page of the index is
    # asked for; whichever comes first is the reason.
    told = mounted.errors()
    assert any(f"{mounted.source} is lost: " in line for line in told), told
    assert store(mounted.path / "new") == errno.EIO
    drive.recover()
    mounted.remount()
    assert {load(mounted.path / f"{number}") for number in range(COUNT)} <= {0, errno.ENOENT}
    assert store(mounted.path / "again") == 0


def test_a_server_killed_on_a_lost_device_leaves_one_errno(
    mounted: Mounted, drive: FailingDrive
) -> None:
    """[device-lost] And the next start works once the device does."""
    drive.fail(reads=Fails.ALL, writes=Fails.ALL)
    store(mounted.path / "new")
    drive.write_back()  # XFS itself writes its log every 30 s only
    until(lambda: "device_lost" in mounted.status(), "the server finds out")
    mounted.send_kill()
    until(lambda: not os.path.exists(f"/proc/{mounted.server_pid}/fd/0"), "it has ended")
    assert {load(mounted.path / f"{number}") for number in range(COUNT)} <= ENDED
    mounted.kill_daemon()
    refused = run_kvfs("mount", drive.path, str(mounted.path), check=False)
    assert refused.returncode == SourceDamaged.exit_code, refused.stderr
    drive.recover()
    mounted.start()
    assert {load(mounted.path / f"{number}") for number in range(COUNT)} <= {0, errno.ENOENT}


def test_a_failed_file_system_that_a_client_holds_is_waited_for_and_named(
    mounted: Mounted, drive: FailingDrive
) -> None:
    """[device-lost] It would be joined, and serve nothing but errors."""
    kept = (mounted.path / "0").open("rb")
    assert kept.read(4) == DATA[:4]
    drive.fail(reads=Fails.ALL, writes=Fails.ALL)
    store(mounted.path / "new")
    drive.write_back()
    until(lambda: "device_lost" in mounted.status(), "the server finds out")
    mounted.kill_daemon()
    drive.recover()
    if "passthrough" in mounted.flags[0]:
        refused = run_kvfs("mount", drive.path, str(mounted.path), check=False)
        assert refused.returncode == SourceBusy.exit_code, refused.stderr
        assert "has failed" in refused.stderr
    with contextlib.suppress(OSError):  # ENOTCONN: the flush has no server
        kept.close()
    mounted.start()
    assert {load(mounted.path / f"{number}") for number in range(COUNT)} <= {0, errno.ENOENT}
