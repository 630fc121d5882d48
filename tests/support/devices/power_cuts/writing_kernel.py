"""A kernel that writes back some part of a file, or the log, while a load is recorded.

It does so in an order that no program can rely on; the real one does after up to half a minute.
"""

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.devices.power_cuts.power import write_back

PAGE_BYTES: Final = 4096


class Kernel:
    """Writes back what it likes, when it likes. Below kvfs that is an extent."""

    def __init__(self, draw: random.Random, log: Path, extents: Path | None) -> None:
        """*log* is a file whose change goes to the log; *extents* are kvfs's, if it is kvfs."""
        self._draw = draw
        self._log = log
        self._extents = extents
        self._writing = threading.Lock()

    def resting(self) -> threading.Lock:
        """Return what keeps it from writing while it is held: nobody shall wait for it then."""
        return self._writing

    def may_write(self, fd: int) -> None:
        """Write back some of the open file *fd*, perhaps, and perhaps the log."""
        if self._draw.random() < 0.5:
            self._some_of(fd)
        if self._draw.random() < 0.25:
            self.force_log()

    def force_log(self) -> None:
        """Let what was logged reach the drive, and no data."""
        with self._unless_it_rests() as writes:
            if not writes:
                return
            fd = os.open(self._log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)  # a change that is logged even with lazytime
                os.fsync(fd)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _unless_it_rests(self) -> Iterator[bool]:
        writes = self._writing.acquire(blocking=False)
        try:
            yield writes
        finally:
            if writes:
                self._writing.release()

    def _some_of(self, fd: int) -> None:
        status = os.fstat(fd)
        pages = -(-status.st_size // PAGE_BYTES)
        if pages == 0:
            return
        first = self._draw.choice((0, 0, 1, self._draw.randrange(pages)))
        count = self._draw.choice((1, pages, self._draw.randint(1, pages)))
        path: Path | str = f"/proc/self/fd/{fd}"
        if self._extents is not None:
            path = self._extents / f"{status.st_ino & 0xFF:02x}" / f"{status.st_ino:016x}"
        with self._unless_it_rests() as writes, contextlib.suppress(FileNotFoundError):  # evicted
            if not writes:
                return
            extent_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                write_back(extent_fd, first * PAGE_BYTES, count * PAGE_BYTES)
            finally:
                os.close(extent_fd)
