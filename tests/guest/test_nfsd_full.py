"""A pool that clients of nfsd fill five times over, at its own settings, with a local writer.

On NFSv3 nfsd keeps a file open for some seconds, on v4.2 as long as a client does.
"""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.guest.conftest import Rack, rack
from tests.support.calls import read_file, tolerated, write_file
from tests.support.mounting import run_kvfs
from tests.support.stamped import seed_of, stamped
from tests.support.stepping import until

MIB: Final = 1 << 20
CAPACITY_BYTES: Final = 64 * MIB
BLOCK_BYTES: Final = 4 * MIB
#: How many blocks are five times the capacity.
COUNT: Final = 5 * CAPACITY_BYTES // BLOCK_BYTES
#: Within so long after the last close everything may go.
GONE_WAIT_S: Final = 60.0
#: What an evicted block is to a client that still knows its name.
MISS: Final = (errno.ENOENT, errno.ESTALE)


@pytest.fixture
def served(drive: Path, version: str) -> Iterator[Rack]:
    with rack(f"full-{version}", f"--capacity={CAPACITY_BYTES}") as made:
        yield made
        assert made.mounted.errors() == []


def store(root: Path, name: str) -> None:
    """Store as connectors do."""
    write_file(root / f"{name}.tmp", stamped(name, BLOCK_BYTES))
    os.rename(root / f"{name}.tmp", root / name)


def look_at(root: Path, name: str) -> bool:
    """Read *name*, which is whole or a miss; return whether it is there."""
    with tolerated(*MISS):
        seed_of(read_file(root / name), name, BLOCK_BYTES)
        return True
    return False


class LocalWriter(threading.Thread):
    """Stores blocks on the host, and reads each back, until it is told to stop."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.stored = 0
        self.failure: Exception | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Store, and leave the emulated processors to others in between."""
        try:
            while not self._over.wait(0.2):
                store(self.root, f"local-{self.stored}")
                look_at(self.root, f"local-{self.stored}")
                self.stored += 1
        except (OSError, AssertionError) as error:
            self.failure = error

    def end(self) -> None:
        """Let it end. Raises what it met."""
        self._over.set()
        self.join()
        if self.failure is not None:
            raise self.failure


def test_five_times_the_capacity(served: Rack, version: str) -> None:
    """[life-server] Nobody gets ENOSPC, what is there is whole, and soon everything may go."""
    one, two = served.mount(0, version), served.mount(1, version)
    local = LocalWriter(served.path)
    local.start()
    hits = 0
    try:
        for number in range(COUNT):
            store(one, f"client-{number}")
            for root, other in ((one, number), (two, number // 2)):
                hits += look_at(root, f"client-{other}")
    finally:
        local.end()
    assert local.stored > 0
    assert hits >= COUNT // 2
    for name in os.listdir(served.path):
        look_at(served.path, name)

    def all_went() -> bool:
        run_kvfs("evict", str(served.path))
        return os.listdir(served.path) == [] and served.mounted.status()["used_bytes"] == 0

    until(all_went, "everything went, and its space is free", GONE_WAIT_S)
    store(one, "again")
    assert look_at(served.path, "again")
