"""A loop device for a test: over a sparse file in memory, given back whatever happens.

The machine has eight, for all that runs on it: hold one at a time, and briefly.
"""

import contextlib
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.mounts.mounting import workplace

#: Others' tests hold the devices for seconds.
_FREE_WAIT_S: Final = 120.0
_RETRY_S: Final = 0.1
_PIECE_BYTES: Final = 1 << 20


class LoopDevice(NamedTuple):
    """The device's path, and the file that its bytes are in."""

    path: str
    backing: Path


@contextlib.contextmanager
def loop_device(size_bytes: int, *, backing: Path | None = None) -> Iterator[LoopDevice]:
    """Yield a loop device over *backing*, without it over a fresh sparse file of *size_bytes*."""
    with contextlib.ExitStack() as stack:
        if backing is None:
            backing = stack.enter_context(workplace()) / "drive"
            backing.touch()
            os.truncate(backing, size_bytes)
        path = _attach(backing)
        stack.callback(_detach, path)
        yield LoopDevice(path, backing)


def digest_of(path: Path) -> str:
    """Return a digest of what is not zero in the file *path*, cheap for a sparse one.

    Of a loop device it takes the backing file: the device's own page cache may be older.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        digest.update(b"%d" % size_bytes)
        offset_bytes = 0
        while offset_bytes < size_bytes:
            try:
                offset_bytes = os.lseek(fd, offset_bytes, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole up to the end
                break
            offset_bytes -= offset_bytes % _PIECE_BYTES
            data = os.pread(fd, _PIECE_BYTES, offset_bytes)
            if data.strip(b"\0"):
                digest.update(b"%d:" % offset_bytes + data)
            offset_bytes += _PIECE_BYTES
    finally:
        os.close(fd)
    return digest.hexdigest()


def loops_over(backing: Path) -> list[str]:
    """Return the loop devices that have the file *backing*."""
    shown = subprocess.run(
        ["losetup", "--noheadings", "--output", "NAME", "--associated", str(backing)],
        check=True,
        capture_output=True,
        text=True,
    )
    return shown.stdout.split()


def _attach(backing: Path) -> str:
    deadline_s = time.monotonic() + _FREE_WAIT_S
    command = ["losetup", "--find", "--show", str(backing)]
    while True:
        shown = subprocess.run(command, check=False, capture_output=True, text=True)
        if shown.returncode == 0:
            return shown.stdout.strip()
        assert time.monotonic() < deadline_s, f"no free loop device: {shown.stderr}"
        threading.Event().wait(_RETRY_S)


def _detach(path: str) -> None:
    subprocess.run(["losetup", "--detach", path], check=True, capture_output=True)
