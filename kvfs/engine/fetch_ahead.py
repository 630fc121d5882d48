"""Reads blocks into the page cache ahead of their use, in the order in which they were asked for.

A thread of its own reads one extent after the other, so what clients load has the device to itself
but for one read. What the pages displace is the kernel's choice, as with any read.
"""

import contextlib
import os
from collections import deque
from typing import Final

from kvfs.core.errors import Damaged
from kvfs.core.types import InodeNo
from kvfs.pool.pool import Pool
from kvfs.storage.background import Aside

#: Blocks that wait to be read; more are not.
FETCHES_MAX: Final = 4096
_AT_ONCE_BYTES: Final = 1 << 20


class FetchAhead:
    """The blocks of one pool that wait to be read."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: deque[InodeNo] = deque()
        self._reader: Aside[int] = Aside("kvfs-fetch")
        self._buffer = memoryview(bytearray(_AT_ONCE_BYTES))
        pool.ends_first(self.close)

    def add(self, ino: InodeNo) -> bool:
        """Have block *ino* read; False if too many wait. It counts as used."""
        if len(self._waiting) >= FETCHES_MAX:
            return False
        self._pool.rules.heat.touch(ino)
        self._waiting.append(ino)
        self._go_on()
        return True

    def run_due(self) -> None:
        """Count what was read, and go on."""
        read = self._reader.pop_result()
        if read is not None:
            self._pool.rules.hints.counts.fetched += read
        self._go_on()

    def close(self) -> None:
        """Stop after the read under way."""
        self._waiting.clear()
        self._reader.join()

    def _go_on(self) -> None:
        if self._waiting and not self._reader.busy:
            self._reader.start(self._read_all)

    def _read_all(self) -> int:
        """Read what waits, in the thread; return how many blocks were read."""
        read = 0
        with contextlib.suppress(IndexError):  # all are read
            while True:
                read += self._read(self._waiting.popleft())
        return read

    def _read(self, ino: InodeNo) -> bool:
        """Read block *ino*, and return whether that went well: it may be gone by now."""
        calls = self._pool.syscalls
        try:
            fd = self._pool.extents.open(ino, os.O_RDONLY)
        except (Damaged, OSError):
            return False
        try:
            at_bytes = 0
            while read_bytes := calls.preadv(fd, [self._buffer], at_bytes):
                at_bytes += read_bytes
        except OSError:
            return False
        finally:
            calls.close(fd)
        return True
