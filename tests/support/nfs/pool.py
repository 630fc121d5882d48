"""A pool, its mount, a Ganesha that exports it and clients of that: one context for a test.

``with nfs_pool(logs) as pool, pool.client(3) as client`` is the whole of it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.machines.own_network import Network, own_network
from tests.support.mounts.mounting import Mounted, own_tmpfs, skip_without_mounts
from tests.support.nfs.client import NfsClient
from tests.support.nfs.ganesha import Export, Ganesha, why_no_ganesha

#: Where clients mount what the tests call the pool.
NAME: Final = "/pool"


class NfsPool:
    """All of it runs; what a test stops or kills it starts again itself."""

    def __init__(self, network: Network, mounted: Mounted, server: Ganesha, source: Path) -> None:
        self.network = network
        self.mounted = mounted
        self.server = server
        self.source = source
        """The directory that is the pool."""
        self._clients = 0

    @property
    def path(self) -> Path:
        """The mount, as local processes see it."""
        return self.mounted.path

    def client(self, version: int, *, export: str = NAME, retries: int = 0) -> NfsClient:
        """Return a new client, under a name of its own."""
        self._clients += 1
        return NfsClient(
            self.network, version, export, f"client-{version}-{self._clients}", retries=retries
        )


@contextlib.contextmanager
def nfs_pool(
    logs: Path, *flags: str, settings: str = "", kind: type[Mounted] = Mounted
) -> Iterator[NfsPool]:
    """Mount a pool in memory with *flags*, and export it with *settings* beside the export.

    *logs* is a directory that outlives it, for what the server says. The daemon's own log goes
    there too, and must hold no error in the end.
    """
    skip_without_mounts()
    assert (why := why_no_ganesha()) is None, why
    log = ("--log-file", str(logs / "kvfs.log"))
    with (
        own_network() as network,
        own_tmpfs() as source,
        kind(source, network.place / "kv", *log, *flags) as mounted,
    ):
        mounted.log_file = logs / "kvfs.log"
        with Ganesha(network, logs, Export(NAME, mounted.path), settings=settings) as server:
            yield NfsPool(network, mounted, server, source)
        mounted.stop()
        assert mounted.errors() == []
