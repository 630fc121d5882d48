"""The device below does not answer: what waits, what goes on, and what users are told."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
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
UMOUNT_EXIT_CODE: Final = 12
#: No call may take longer, though the device is silent for much longer. A store is refused in less
#: than a second on a quiet machine.
LONGEST_S: Final = 4.0

#: Makes a call of one kind; each has another number.
Call = Callable[[int], object]


@pytest.fixture(params=["daemon", "passthrough"])
def data_path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def store(directory: Path, name: str) -> None:
    (directory / f"{name}.tmp").write_bytes(DATA)
    os.rename(directory / f"{name}.tmp", directory / name)


class Calls:
    """Calls of one kind, one after the other in a thread, until it ends."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._ends = threading.Event()
        self.longest_s = 0.0
        self.done = 0
        self.errors: set[int] = set()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        for number in count():
            begun_s = time.monotonic()
            try:
                self._call(number)
            except OSError as error:
                self.errors.add(error.errno or 0)
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            self.done += 1
            if self._ends.wait(0.02):
                return

    def end(self) -> None:
        """Make no further call; return when the last one has ended."""
        self._ends.set()
        self._thread.join()


def calls_without_device(kv: Path) -> dict[str, Call]:
    """Return a call of each kind that needs no device, in directories where nothing is stored."""
    loaded, changed = kv / "loaded", kv / "changed"
    return {
        "stat": lambda _: os.stat(loaded / "1"),
        "lookup": lambda _: os.path.exists(loaded / "none"),
        "listing": lambda _: os.listdir(loaded),
        "load": lambda _: (loaded / "0").read_bytes(),
        "statvfs": lambda _: os.statvfs(kv),
        "mkdir": lambda number: os.mkdir(changed / f"made-{number}"),
        "chmod": lambda _: os.chmod(changed / "1", 0o666),
        "utime": lambda number: os.utime(changed / "2", (number, number)),
        "xattr": lambda number: os.setxattr(changed / "3", "user.note", b"%d" % number),
        "rename": lambda number: os.rename(*(changed / f"r{n % 2}" for n in (number, number + 1))),
    }


def calls_with_device(kv: Path) -> dict[str, Call]:
    """Return a call of each kind that needs the device, and stores."""
    stored = kv / "stored"
    return {
        "store": lambda number: store(stored, f"new-{number}"),
        "rewrite": lambda _: (stored / "1").write_bytes(DATA),
        "append": lambda _: os.close(os.open(stored / "2", os.O_WRONLY | os.O_APPEND)),
        "truncate": lambda number: os.truncate(stored / "3", 4096 + number),
    }


@contextmanager
def looked_at(mounted: Mounted) -> Iterator[list[str]]:
    """Yield where the server's main thread was found to wait for a device."""
    found: list[str] = []
    ends = threading.Event()
    task = Path(f"/proc/{mounted.server_pid}/task/{mounted.server_pid}")

    def look() -> None:
        while not ends.wait(0.01):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "D":
                found.append((task / "wchan").read_text())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()


def told_by(command: str, mounted: Mounted) -> tuple[int, str]:
    done = run_kvfs(command, str(mounted.path), check=False)
    return done.returncode, done.stdout + done.stderr


def test_what_needs_no_device_goes_on_beside_stores(drive: FailingDrive, data_path: str) -> None:
    """[device-aside] Calls of every kind at once: no thread that answers waits for the device."""
    with mounted_on(drive, data_path, *SETTINGS) as mounted:
        kv, server_pid = mounted.path, mounted.status()["server_pid"]
        for directory in ("loaded", "changed", "stored"):
            (kv / directory).mkdir()
            for number in range(5):
                store(kv / directory, f"{number}")
        store(kv / "changed", "r0")
        run_kvfs("sync", str(kv))
        (kv / "loaded" / "0").read_bytes()
        with looked_at(mounted) as waits, drive.silent():
            free = {name: Calls(call) for name, call in calls_without_device(kv).items()}
            bound = {name: Calls(call) for name, call in calls_with_device(kv).items()}
            until(lambda: mounted.status()["device_state"] == "silent", "the probe finds out")
            until(lambda: all(calls.errors for calls in bound.values()), "stores are refused")
            before = {name: calls.done for name, calls in free.items()}
            until(
                lambda: all(calls.done > before[name] + 20 for name, calls in free.items()),
                "what needs no device goes on",
            )
            for calls in (*free.values(), *bound.values()):
                calls.end()
        assert waits == []
        assert {error for calls in bound.values() for error in calls.errors} == {errno.EIO}
        assert not any(calls.errors for calls in free.values())
        assert max(calls.longest_s for calls in (*free.values(), *bound.values())) < LONGEST_S
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        status = mounted.status()
        assert (status["server_pid"], status["restarts"]) == (server_pid, 0), mounted.errors()
        store(kv / "stored", "afterwards")
        assert all((kv / "loaded" / f"{number}").read_bytes() == DATA for number in range(5))


def test_a_load_that_needs_the_device_ends(drive: FailingDrive) -> None:
    """[device-aside] On the daemon path; on passthrough a read waits in the kernel."""
    with mounted_on(drive, "daemon", *SETTINGS, "--set=device_deadline_s=2") as mounted:
        store(mounted.path, "block")
        run_kvfs("sync", str(mounted.path))
        mounted.stop()
        mounted.start()
        with drive.silent(), pytest.raises(OSError, match=os.strerror(errno.EIO)):
            (mounted.path / "block").read_bytes()
        until(lambda: mounted.status()["device_state"] == "serving", "it answers again")
        assert (mounted.path / "block").read_bytes() == DATA


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
            assert code == UMOUNT_EXIT_CODE, told
            assert f"server {server_pid} runs on: it waits for {drive.path}, which" in told
            assert not mounted.path.is_mount()
            assert os.path.exists(f"/proc/{server_pid}")
        until(lambda: not os.path.exists(f"/proc/{server_pid}"), "the server ends by itself")
        mounted.start()
        assert (mounted.path / "block").read_bytes() == DATA
