"""Lifeboat Cache: a file of each chunk, an index in memory, and one in SQLite to start from."""

import hashlib
import re
from typing import ClassVar

import pytest

from tests.connectors.connector import Connector
from tests.connectors.contract import BlockFiles, Deletes, Start, block_hash
from tests.connectors.contract_eviction import EvictedAndBelieved, FillsThePool

pytestmark = pytest.mark.connectors


class TestLifeboat(BlockFiles, Deletes, EvictedAndBelieved, FillsThePool):
    """Its local tier with the manifest, as it comes, but that it may fill the pool."""

    driver: ClassVar = ("lifeboat_store",)
    config: ClassVar = {"tier": {"type": "filesystem", "min_free_gb": 0}}
    tested_version = "lifeboatcache 0.1.11"
    o_direct_too = True  # what a load does not find in the page cache
    forgets_vanished = False
    believes = True
    times = 5
    holds_files = True  # the manifest
    data_files: ClassVar = re.compile(r"/[0-9a-f]{40}")

    def files(self, connector: Connector, keys: list[int]) -> dict[int, str]:
        """Hashes of its keys, which it asks nobody about."""
        assert connector.pid
        names = {key: f"Llama-3.1-8B@0@0@{block_hash(key)}" for key in keys}
        return {
            key: hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
            for key, name in names.items()
        }

    def test_the_tested_version(self, start: Start) -> None:
        """What the table says; and its tier passed its own probe."""
        start()
        assert f"lifeboatcache {self.opened['version']}" == self.tested_version
        assert self.opened["skipped"] == {}


class TestLifeboatDaemonPath(TestLifeboat):
    """Every byte through the daemon."""

    data_path = "daemon"
