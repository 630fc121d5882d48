"""Mooncake Store's SSD offload, with each of its three storage backends."""

import re
from typing import ClassVar

import pytest

from tests.connectors.contract import MIB, BlockFiles, Deletes, Start
from tests.connectors.contract_eviction import (
    EvictedAfterItsProcess,
    KeepsItsLimit,
    RefusedByAFullPool,
)

pytestmark = pytest.mark.connectors

KEPT_FREE_BYTES = 256 * MIB
"""Below this Mooncake takes a disk for full: ``bucket`` evicts, ``file_per_key`` stops."""


class Mooncake(EvictedAfterItsProcess):
    """What the backends share: one client to a directory, written in place, read from disk."""

    driver = ("mooncake_store",)
    tested_version = "mooncake-transfer-engine-non-cuda 0.3.13.post1"
    shares_directory = False
    quick_start = True


class TestBucket(Mooncake, KeepsItsLimit):
    """Several blocks in a file, its index beside it: the default."""

    config: ClassVar = {"backend": "bucket_storage_backend"}
    full_pool_config: ClassVar = {"limit_bytes": 36 * MIB}
    kept_free_bytes = KEPT_FREE_BYTES
    data_files = re.compile(r"\.bucket$")

    def test_works_delete(self, start: Start) -> None:
        """Deleted blocks are misses. Stored anew they stay in memory, as on any file system."""
        connector = start()
        self.stores(connector, self.keys)
        gone, kept = self.keys[::2], self.keys[1::2]
        connector.call("delete", keys=gone)
        self.holds(connector, kept)
        assert self.hits(connector, gone) == []
        assert connector.call("load", keys=gone, version=1)["loaded"] == []


class TestFilePerKey(Mooncake, BlockFiles, Deletes, RefusedByAFullPool):
    """A file for each block; the master goes on believing in one that is gone.

    Its limit is 90 % of the mount, and it stores nothing with less than 256 MiB free: on a pool
    below 2.6 GiB it meets that end first, without evicting.
    """

    config: ClassVar = {"backend": "file_per_key_storage_backend"}
    full_pool_config: ClassVar = {"wait_s": 8.0}
    kept_free_bytes = KEPT_FREE_BYTES
    forgets_vanished = False


class TestOffsetAllocator(Mooncake, Deletes, KeepsItsLimit):
    """One big file, open for life, emptied at start."""

    config: ClassVar = {"backend": "offset_allocator_storage_backend"}
    full_pool_config: ClassVar = {"limit_bytes": 36 * MIB}
    data_files = re.compile(r"/kv_cache\.data$")
    restart_warm = False
    holds_files = True
