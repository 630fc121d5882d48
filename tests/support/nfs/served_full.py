"""A small pool that an NFS server exports and others fill: what they store, and what they may find.

Whatever is there is whole. A miss is all that an eviction may look like, and nobody gets ENOSPC.
"""

import errno
import os
import threading
from pathlib import Path
from typing import Final

from tests.support.clients.stamped import seed_of, stamped
from tests.support.kernel.calls import read_file, write_file

CAPACITY_BYTES: Final = 64 << 20
#: How many capacities the clients store.
TIMES: Final = 5
#: Within so long after the last close everything may go.
GONE_WAIT_S: Final = 60.0
#: What an evicted block is to who still knows its name, or has it open.
MISS: Final = (errno.ENOENT, errno.ESTALE)


def store(root: Path, name: str, size_bytes: int) -> None:
    """Store a block as connectors do."""
    write_file(root / f"{name}.tmp", stamped(name, size_bytes))
    os.rename(root / f"{name}.tmp", root / name)


def look_at(root: Path, name: str, size_bytes: int) -> bool:
    """Read *name*, which is whole or a miss; return whether it is there."""
    try:
        seed_of(read_file(root / name), name, size_bytes)
    except OSError as error:
        if error.errno not in MISS:
            raise
        return False
    return True


class LocalWriter(threading.Thread):
    """Stores blocks on the host, and reads each back, until it is told to stop."""

    def __init__(self, root: Path, size_bytes: int, pause_s: float = 0.0) -> None:
        """*pause_s* after each block leaves the processors to others."""
        super().__init__(daemon=True)
        self.root = root
        self.stored = 0
        self.failure: Exception | None = None
        self._size_bytes = size_bytes
        self._pause_s = pause_s
        self._over = threading.Event()

    def run(self) -> None:
        """Store; the first error is the end."""
        try:
            while not self._over.wait(self._pause_s):
                name = f"local-{self.stored}"
                store(self.root, name, self._size_bytes)
                look_at(self.root, name, self._size_bytes)
                self.stored += 1
        except (OSError, AssertionError) as error:
            self.failure = error

    def end(self) -> None:
        """Let it end. Raises what it met."""
        self._over.set()
        self.join()
        if self.failure is not None:
            raise self.failure
