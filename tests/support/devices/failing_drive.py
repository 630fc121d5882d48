"""A drive that fails on demand: a loop device over a file that a program of the test's own serves.

Neither device-mapper nor the kernel's fault injection is needed: the program is a FUSE file system
with one file, and answers EIO where it is told to (failing_drive_program.py).
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from tests.fuse.conftest import require_passthrough
from tests.support.devices.failing_drive_program import FILE, Fails
from tests.support.devices.loop import loop_device
from tests.support.mounts.mounting import ROOT, Mounted, workplace

_END_WAIT_S: Final = 20.0


class FailingDrive:
    """The drive at ``path``; ``fail`` says what fails from now on."""

    def __init__(self, program: "subprocess.Popen[str]") -> None:
        self.path = ""
        self._program = program

    def fail(self, *, reads: Fails = Fails.NONE, writes: Fails = Fails.NONE) -> None:
        """Fail these from now on, and nothing else."""
        self._ask({"reads": reads, "writes": writes})

    def recover(self) -> None:
        """Fail nothing any more."""
        self.fail()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Inside the ``with`` answer nothing; what waits at its end is answered then."""
        self._ask({"silent": "yes"})
        try:
            yield
        finally:
            self._ask({"silent": ""})

    @contextlib.contextmanager
    def slow(self, delay_s: float) -> Iterator[None]:
        """Inside the ``with`` answer each request after *delay_s*."""
        self._ask({"delay_s": str(delay_s)})
        try:
            yield
        finally:
            self._ask({"delay_s": "0"})

    def failed(self) -> int:
        """Return how many requests have failed since the drive was made."""
        return self._ask({})

    def write_back(self) -> None:
        """Have everything written to it, as the kernel does within half a minute."""
        subprocess.run(["blockdev", "--flushbufs", self.path], check=False, capture_output=True)

    def _ask(self, orders: dict[str, str]) -> int:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(orders) + "\n")
        self._program.stdin.flush()
        return int(self._program.stdout.readline())

    def __enter__(self) -> Self:
        self._ask({})  # it serves
        return self

    def __exit__(self, *_: object) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(_END_WAIT_S)
        assert self._program.stdout is not None
        self._program.stdout.close()


@contextlib.contextmanager
def mounted_on(drive: FailingDrive, data_path: str, *flags: str) -> Iterator[Mounted]:
    """Yield a mount of a fresh pool on *drive*; skips where *data_path* is not there."""
    with (
        workplace("disk") as place,
        Mounted(drive.path, place / "kv", f"--data-path={data_path}", *flags) as mount,
    ):
        if data_path == "passthrough":
            require_passthrough(mount)
        yield mount


@contextlib.contextmanager
def failing_drive(size_bytes: int = 400 << 20) -> Iterator[FailingDrive]:
    """Yield a blank drive of *size_bytes* that does not fail yet; its bytes lie in memory."""
    with (
        workplace() as place,
        served_drive("tests.support.devices.failing_drive_program", place, size_bytes) as drive,
    ):
        try:
            yield drive
        finally:
            drive.recover()


@contextlib.contextmanager
def served_drive(module: str, place: Path, size_bytes: int, *more: Path) -> Iterator[FailingDrive]:
    """Yield the drive that the program *module* serves; its bytes are in *place*/file.

    *more* are further arguments of the program.
    """
    with (
        served_file(module, place, size_bytes, *more) as drive,
        loop_device(size_bytes, backing=Path(drive.path)) as device,
    ):
        drive.path = device.path
        yield drive


@contextlib.contextmanager
def served_file(module: str, place: Path, size_bytes: int, *more: Path) -> Iterator[FailingDrive]:
    """Yield the same without a loop device: its path is that of the file that is served."""
    file, served = place / "file", place / "served"
    file.touch()
    os.truncate(file, size_bytes)
    served.mkdir()
    program = subprocess.Popen(
        [sys.executable, "-m", module, file, served, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with FailingDrive(program) as drive:
        drive.path = str(served / os.fsdecode(FILE))
        yield drive
