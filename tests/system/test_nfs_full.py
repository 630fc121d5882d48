"""A pool that clients of a Ganesha fill five times over: it closes nothing, at its own settings.

Half of its descriptors are its bound (docs/nfs.md), which no pool lives to see. A local process
stores as well, all the while.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.settings import Settings
from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import seed_of, stamped
from tests.support.clients.stepping import until
from tests.support.kernel.calls import tolerated
from tests.support.mounts.mounting import run_kvfs
from tests.support.nfs.client import NfsClient
from tests.support.nfs.pool import NfsPool, nfs_pool
from tests.support.nfs.served_full import (
    CAPACITY_BYTES,
    GONE_WAIT_S,
    MISS,
    TIMES,
    LocalWriter,
    look_at,
)

pytestmark = pytest.mark.needs_fuse

BLOCK_BYTES: Final = 1 << 20


@pytest.fixture(params=[pytest.param("daemon", marks=pytest.mark.proof), "passthrough"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NfsPool]:
    """A small pool on each data path, behind a server with its default settings."""
    flags = (f"--capacity={CAPACITY_BYTES}", f"--data-path={request.param}")
    with nfs_pool(tmp_path, *flags) as made:
        if request.param == "passthrough":
            require_passthrough(made.mounted)
        yield made


def store_and_read(client: NfsClient, names: list[str]) -> None:
    """Store all; read each, and one of those before."""
    for number, name in enumerate(names):
        client.call("store", f"/{name}", stamped(name, BLOCK_BYTES))
        for other in (name, names[number // 2]):
            with tolerated(*MISS):
                seed_of(client.call("read_file", f"/{other}"), other, BLOCK_BYTES)


def assert_all_may_go(pool: NfsPool) -> None:
    """Each name goes; of the space, what the server has on passthrough comes back at its close."""
    until(
        lambda: (run_kvfs("evict", str(pool.path)), os.listdir(pool.path))[1] == [],
        "everything is evicted",
        GONE_WAIT_S,
    )
    kept_bytes = Settings().file_server_passthrough_max * CAPACITY_BYTES + BLOCK_BYTES
    assert pool.mounted.status()["open_bytes"] <= kept_bytes
    # A block that was on its way to the device is closed, and then removed, at the next tick.
    until(
        lambda: pool.mounted.status()["used_bytes"] <= kept_bytes, "its space is back", GONE_WAIT_S
    )


@pytest.mark.parametrize("version", [3, pytest.param(4, marks=pytest.mark.proof)], ids=["v3", "v4"])
def test_five_times_the_capacity(pool: NfsPool, version: int) -> None:
    """[life-server] Nobody gets ENOSPC, and what is there is whole; then all may go, and again."""
    local = LocalWriter(pool.path, BLOCK_BYTES)
    count = TIMES * CAPACITY_BYTES // BLOCK_BYTES
    with pool.client(version) as client:
        local.start()
        try:
            store_and_read(client, [f"client-{number}" for number in range(count)])
        finally:
            local.end()
        assert local.stored > 0
        for name in os.listdir(pool.path):
            if not name.endswith(".tmp"):
                look_at(pool.path, name, BLOCK_BYTES)
    assert pool.mounted.status()["space_waits"]["rejected"] == 0
    assert_all_may_go(pool)
    with pool.client(version) as client:
        store_and_read(client, [f"again-{number}" for number in range(count // TIMES)])
