"""AIBrix KVCache: SHFS, a file of each block, and RocksDB, a database."""

import re
from typing import ClassVar

import pytest

from tests.connectors.contract import BlockFiles, Deletes, Start
from tests.connectors.contract_eviction import (
    EvictedAfterItsProcess,
    EvictedQuietly,
    FillsThePool,
    RefusedByAFullPool,
)

pytestmark = pytest.mark.connectors


class TestShfs(BlockFiles, Deletes, EvictedQuietly, FillsThePool):
    """Its tier for a shared file system."""

    driver: ClassVar = ("aibrix_tiers", "SHFS")
    config: ClassVar = {"environment": {}}
    tested_version = "aibrix-kvcache 0.8.0"
    overwrites = True
    times = 5

    def test_the_tested_version(self, start: Start) -> None:
        """What the table says."""
        start()
        assert f"aibrix-kvcache {self.opened['version']}" == self.tested_version


class TestShfsDaemonPath(TestShfs):
    """Every byte through the daemon."""

    data_path = "daemon"


class TestRocksDB(Deletes, EvictedAfterItsProcess, RefusedByAFullPool):
    """Its tier in RocksDB, whose files go together or not at all."""

    driver: ClassVar = ("aibrix_tiers", "ROCKSDB")
    config: ClassVar = {
        "environment": {
            "AIBRIX_KV_CACHE_OL_ROCKSDB_WRITE_BUFFER_SIZE": str(4 << 20),
            "AIBRIX_KV_CACHE_OL_ROCKSDB_MAX_TOTAL_WAL_SIZE": str(8 << 20),
        },
        "evict": "together",
    }
    tested_version = "aibrix-kvcache 0.8.0"
    overwrites = True
    shares_directory = False
    holds_files = True
    data_files: ClassVar = re.compile(r"\.(sst|log)$")
