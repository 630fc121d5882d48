"""A pool that clients of nfsd fill five times over, at its own settings, with a local writer.

On NFSv3 nfsd keeps a file open for some seconds, on v4.2 as long as a client does.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.guest.conftest import Rack, rack
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import run_kvfs
from tests.support.nfs.served_full import (
    CAPACITY_BYTES,
    GONE_WAIT_S,
    TIMES,
    LocalWriter,
    look_at,
    store,
)

BLOCK_BYTES: Final = 4 << 20
COUNT: Final = TIMES * CAPACITY_BYTES // BLOCK_BYTES
#: The emulated processors are left to others in between.
PAUSE_S: Final = 0.2


@pytest.fixture
def served(drive: Path, version: str) -> Iterator[Rack]:
    with rack(f"full-{version}", f"--capacity={CAPACITY_BYTES}") as made:
        yield made
        assert made.mounted.errors() == []


def test_five_times_the_capacity(served: Rack, version: str) -> None:
    """[life-server] Nobody gets ENOSPC, what is there is whole, and soon everything may go."""
    one, two = served.mount(0, version), served.mount(1, version)
    local = LocalWriter(served.path, BLOCK_BYTES, PAUSE_S)
    local.start()
    hits = 0
    try:
        for number in range(COUNT):
            store(one, f"client-{number}", BLOCK_BYTES)
            for root, other in ((one, number), (two, number // 2)):
                hits += look_at(root, f"client-{other}", BLOCK_BYTES)
    finally:
        local.end()
    assert local.stored > 0
    assert hits >= COUNT // 2
    for name in os.listdir(served.path):
        look_at(served.path, name, BLOCK_BYTES)

    def all_went() -> bool:
        run_kvfs("evict", str(served.path))
        return os.listdir(served.path) == [] and served.mounted.status()["used_bytes"] == 0

    until(all_went, "everything went, and its space is free", GONE_WAIT_S)
    store(one, "again", BLOCK_BYTES)
    assert look_at(served.path, "again", BLOCK_BYTES)
