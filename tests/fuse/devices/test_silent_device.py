"""The device below does not answer: what waits, what goes on, and what users are told."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive, mounted_on
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

COUNT: Final = 40
DATA: Final = b"w" * 200_000
#: Both soon; the silence of a server that is only slow, on a busy machine, is shorter.
SETTINGS: Final = ("--set=silent_max_s=4", "--set=device_silent_s=1")
#: Of commands whose server does not answer.
EXIT_CODES: Final = {"status": 12, "doctor": 19, "sync": 12, "umount": 12}


@pytest.fixture(params=["daemon", "passthrough"])
def data_path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def store(directory: Path, name: str) -> None:
    (directory / f"{name}.tmp").write_bytes(DATA)
    os.rename(directory / f"{name}.tmp", directory / name)


@contextmanager
def stored_all_the_time(directory: Path) -> Iterator[list[str]]:
    """Store one block after the other; yield the names of those that are there, in order."""
    stored: list[str] = []
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            name = f"more-{len(stored) % COUNT}"
            store(directory, name)
            stored.append(name)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield stored
    finally:
        ends.set()
        thread.join()


def told_by(command: str, mounted: Mounted) -> tuple[int, str]:
    done = run_kvfs(command, str(mounted.path), check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_server_that_waits_for_its_device_is_left_alone(
    drive: FailingDrive, data_path: str
) -> None:
    """[device-silent] Under stores the server comes to wait. Nobody kills it, or advises that."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        server_pid = mounted.status()["server_pid"]
        with stored_all_the_time(mounted.path) as stored, drive.silent():
            until(
                lambda: any("left alone" in line for line in mounted.errors()),
                "the supervisor finds that the server waits",
            )
            waits = f"server {server_pid} waits in the kernel for its device {drive.path}"
            for command in ("status", "doctor", "sync"):
                code, told = told_by(command, mounted)
                assert code == EXIT_CODES[command], told
                assert waits in " ".join(told.split())
                assert "Do not kill it" in told
                assert "kill -" not in told
        assert stored
        status = mounted.status()
        assert (status["server_pid"], status["restarts"]) == (server_pid, 0), mounted.errors()
        assert all((mounted.path / name).read_bytes() == DATA for name in stored)


def test_while_nobody_stores_names_and_cached_bytes_are_served(
    drive: FailingDrive, data_path: str
) -> None:
    """[device-silent] A probe finds the silence out, and says when it has ended."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        for number in range(COUNT):
            store(mounted.path, f"{number}")
        run_kvfs("sync", str(mounted.path))
        assert mounted.status()["device_state"] == "serving"
        with drive.silent():
            until(lambda: mounted.status()["device_state"] == "silent", "the probe finds out")
            assert mounted.status()["device_silent_s"] >= 1
            assert sorted(os.listdir(mounted.path), key=int) == [f"{n}" for n in range(COUNT)]
            assert os.stat(mounted.path / "0").st_size == len(DATA)
            assert os.statvfs(mounted.path).f_bfree > 0
            assert (mounted.path / "0").read_bytes() == DATA
            _, shown = told_by("status", mounted)
            assert "device silent for, s" in shown
            _, report = told_by("doctor", mounted)
            assert f"{drive.path} has not answered for" in report
            assert "kill nothing" in report
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        assert mounted.status()["device_silent_s"] == 0
        assert any("the device has not answered" in line for line in mounted.errors())
        assert "the device answers again, after" in mounted.log_file.read_text()


def test_an_unmount_does_not_wait_for_the_device(drive: FailingDrive, data_path: str) -> None:
    """[device-silent] It detaches the mount and says what stays; the server ends by itself."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        server_pid = mounted.status()["server_pid"]
        store(mounted.path, "block")
        with drive.silent():
            code, told = told_by("umount", mounted)
            assert code == EXIT_CODES["umount"], told
            assert f"server {server_pid} runs on: it waits for {drive.path}, which" in told
            assert not mounted.path.is_mount()
            assert os.path.exists(f"/proc/{server_pid}")
        until(lambda: not os.path.exists(f"/proc/{server_pid}"), "the server ends by itself")
        mounted.start()
        assert (mounted.path / "block").read_bytes() == DATA
