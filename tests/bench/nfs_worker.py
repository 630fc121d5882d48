"""An NFS client of ``measure_nfs``: stores and loads whole blocks, and says when it did.

``tests.support.nfs.client`` starts it as a process of its own.
"""

import ctypes
import os
import sys
import time
from typing import Final

from tests.support.nfs.client import serve
from tests.support.nfs.libnfs import Nfs

_STAMP_BYTES: Final = 8
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Worker(Nfs):
    """One client. libnfs cuts a block into WRITEs or READs, and sends them all before it waits."""

    def store_blocks(self, names: list[str], size_bytes: int) -> tuple[int, int]:
        """Store *names* as connectors do; returns the monotonic ns of its start and its end.

        What was written is committed at the close, as the kernel's client does it.
        """
        buffer, address = self._buffer(size_bytes)
        start_ns = time.monotonic_ns()
        for name in names:
            buffer[:_STAMP_BYTES] = buffer[-_STAMP_BYTES:] = _stamp(name)
            file = self.open(f"{name}.tmp", _CREATE)
            self.write_from(file, address, size_bytes, 0)
            self.close(file)
            self.rename(f"{name}.tmp", name)
        return start_ns, time.monotonic_ns()

    def load_blocks(self, names: list[str], size_bytes: int) -> tuple[int, int]:
        """Load them. Raises AssertionError for other bytes than were stored."""
        buffer, address = self._buffer(size_bytes)
        start_ns = time.monotonic_ns()
        for name in names:
            file = self.open(name)
            assert self.read_into(file, address, size_bytes, 0) == size_bytes, name
            self.close(file)
            stamp = _stamp(name)
            assert buffer[:_STAMP_BYTES] == buffer[-_STAMP_BYTES:] == stamp, name
        return start_ns, time.monotonic_ns()

    def remove_blocks(self, names: list[str]) -> None:
        """Remove them."""
        for name in names:
            self.unlink(name)

    def _buffer(self, size_bytes: int) -> tuple[bytearray, int]:
        """Return memory whose pages are there, and its address."""
        self.write_bytes = self.read_bytes = size_bytes
        buffer = bytearray(os.urandom(size_bytes))
        return buffer, ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _stamp(name: str) -> bytes:
    return name.encode()[-_STAMP_BYTES:].rjust(_STAMP_BYTES)


if __name__ == "__main__":
    serve(Worker, *sys.argv[1:])
