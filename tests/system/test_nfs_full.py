"""A pool that clients of a Ganesha fill five times over: it closes nothing, at its own settings.

Half of its descriptors are its bound (docs/nfs.md), which no pool lives to see. A local process
stores as well, all the while.
"""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.settings import Settings
from tests.fuse.conftest import require_passthrough
from tests.support.calls import read_file, tolerated, write_file
from tests.support.mounting import run_kvfs
from tests.support.nfs_client import NfsClient
from tests.support.nfs_pool import NfsPool, nfs_pool
from tests.support.stamped import seed_of, stamped
from tests.support.stepping import until

pytestmark = pytest.mark.needs_fuse

MIB: Final = 1 << 20
CAPACITY_BYTES: Final = 64 * MIB
BLOCK_BYTES: Final = MIB
#: How much of the capacity clients store, and when everything must be free to go.
TIMES: Final = 5
GONE_WAIT_S: Final = 60.0
#: What an evicted block is to a server that still knows its name, or has it open.
MISS: Final = (errno.ENOENT, errno.ESTALE)


@pytest.fixture(params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NfsPool]:
    """A small pool on each data path, behind a server with its default settings."""
    flags = (f"--capacity={CAPACITY_BYTES}", f"--data-path={request.param}")
    with nfs_pool(tmp_path, *flags) as made:
        if request.param == "passthrough":
            require_passthrough(made.mounted)
        yield made


class LocalWriter(threading.Thread):
    """Stores blocks on the host, and reads each back, until it is told to stop."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.stored = 0
        self.failure: Exception | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Store; the first error is the end."""
        try:
            while not self._over.is_set():
                self._store(f"local-{self.stored}")
                self.stored += 1
        except (OSError, AssertionError) as error:
            self.failure = error

    def _store(self, name: str) -> None:
        write_file(self.root / f"{name}.tmp", stamped(name, BLOCK_BYTES))
        os.rename(self.root / f"{name}.tmp", self.root / name)
        with tolerated(*MISS):
            seed_of(read_file(self.root / name), name, BLOCK_BYTES)

    def end(self) -> None:
        """Let it end. Raises what it met."""
        self._over.set()
        self.join()
        if self.failure is not None:
            raise self.failure


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
    status = pool.mounted.status()
    assert status["open_bytes"] <= kept_bytes
    assert status["used_bytes"] <= kept_bytes


@pytest.mark.parametrize("version", [3, pytest.param(4, marks=pytest.mark.proof)], ids=["v3", "v4"])
def test_five_times_the_capacity(pool: NfsPool, version: int) -> None:
    """[life-server] Nobody gets ENOSPC, and what is there is whole; then all may go, and again."""
    local = LocalWriter(pool.path)
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
                with tolerated(*MISS):
                    seed_of(read_file(pool.path / name), name, BLOCK_BYTES)
    assert pool.mounted.status()["space_waits"]["rejected"] == 0
    assert_all_may_go(pool)
    with pool.client(version) as client:
        store_and_read(client, [f"again-{number}" for number in range(CAPACITY_BYTES // MIB)])
