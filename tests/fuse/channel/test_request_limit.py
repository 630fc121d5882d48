"""The kernel's time limit for requests, over which it aborts a whole mount; kvfs asks for none."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.machine.hardware import DEFAULT_REQUEST_TIMEOUT, sysctl
from tests.support.devices.failing_drive import served_file
from tests.support.mounts.mounting import Mounted, own_tmpfs, skip_without_mounts, workplace

pytestmark = pytest.mark.needs_fuse

#: The shortest that the kernel keeps; it looks as often.
LIMIT_S: Final = 15
_SETTING: Final = Path("/proc/sys", *DEFAULT_REQUEST_TIMEOUT.split("."))
_PAGE_BYTES: Final = 4096


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Inside the ``with`` a FUSE mount gets the limit, whoever makes it: be short."""
    before = _SETTING.read_text()
    _SETTING.write_text(f"{LIMIT_S}\n")
    try:
        yield
    finally:
        _SETTING.write_text(before)


def test_a_request_may_take_longer_than_the_default_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[request-limit] Beside a mount of another program, which is aborted for it."""
    skip_without_mounts()
    if sysctl(DEFAULT_REQUEST_TIMEOUT) is None:
        pytest.skip("needs Linux 6.15")
    with (
        workplace() as place,
        own_tmpfs() as pool,
        contextlib.ExitStack() as stack,
    ):
        # libfuse leaves an aborted mount where it is.
        stack.callback(subprocess.run, ["umount", "--lazy", str(place / "served")], check=True)
        with limited():
            other = stack.enter_context(
                served_file("tests.support.devices.failing_drive_program", place, _PAGE_BYTES)
            )
            kv = stack.enter_context(Mounted(pool, pool.parent.parent / "kv"))
        found: list[os.stat_result] = []
        waits = threading.Thread(target=lambda: found.append(os.stat(kv.path / "block")))
        (kv.path / "block").write_bytes(b"kv")
        server_pid = kv.status()["server_pid"]
        os.kill(server_pid, signal.SIGSTOP)
        try:
            waits.start()
            with other.silent(), pytest.raises(OSError, match=r"abort|not connected"):
                Path(other.path).read_bytes()
            assert waits.is_alive()
        finally:
            os.kill(server_pid, signal.SIGCONT)
            waits.join()
        assert [status.st_size for status in found] == [2]
        status = kv.status()
        assert (status["server_pid"], status["restarts"]) == (server_pid, 0)
