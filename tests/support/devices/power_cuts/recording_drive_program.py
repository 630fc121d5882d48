"""The program behind a recorded drive: each write and each flush is noted in the order of arrival.

A loop device sends its writes as WRITE and its flushes as FSYNC. It has no FUA of its own, so the
block layer sends a flush behind each such write (blk-flush.c). Requests are answered one at a time,
so that a flush covers exactly the writes noted before it. A write is noted when it comes, for the
drive may have it from then on, and a flush when it is answered: a drive that hangs promises none.
"""

import os
import sys
import time
from pathlib import Path

import pyfuse3
import trio

from tests.support.devices.failing_drive_program import Drive, serve
from tests.support.devices.power_cuts.recording import FLUSH, OP


class RecordingDrive(Drive):
    """Writes go to the file and to the record; see recording.py for its form."""

    def __init__(self, fd: int, record: Path) -> None:
        super().__init__(fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._ops = os.open(record / "ops", flags, 0o600)
        self._bytes = os.open(record / "bytes", flags, 0o600)
        #: Those that wait for it get it in the order in which they came.
        self._one_at_a_time = trio.Lock()

    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        async with self._one_at_a_time:
            os.write(self._bytes, buf)
            os.write(self._ops, OP.pack(time.monotonic_ns(), off, len(buf)))
            return await super().write(fh, off, buf)

    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        async with self._one_at_a_time:
            await super().fsync(fh, datasync)
            os.write(self._ops, OP.pack(time.monotonic_ns(), FLUSH, 0))


if __name__ == "__main__":
    path, served_at, record_at = sys.argv[1:]
    serve(RecordingDrive(os.open(path, os.O_RDWR | os.O_CLOEXEC), Path(record_at)), served_at)
