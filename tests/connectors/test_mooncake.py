"""Mooncake Store's SSD offload, with each of its three storage backends."""

import re
from typing import ClassVar

import pytest

from tests.connectors.contract import BlockFiles, Deletes, Start
from tests.connectors.contract_eviction import EvictedAfterItsProcess

pytestmark = pytest.mark.connectors


class Mooncake(EvictedAfterItsProcess):
    """What the backends share: one client to a directory, written in place, read from disk."""

    driver = ("mooncake_store",)
    tested_version = "mooncake-transfer-engine-non-cuda 0.3.13.post1"
    shares_directory = False
    quick_start = True


class TestBucket(Mooncake):
    """Several blocks in a file, its index beside it: the default."""

    config: ClassVar = {"backend": "bucket_storage_backend"}
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


class TestFilePerKey(Mooncake, BlockFiles, Deletes):
    """A file for each block; the master goes on believing in one that is gone."""

    config: ClassVar = {"backend": "file_per_key_storage_backend"}
    forgets_vanished = False


class TestOffsetAllocator(Mooncake, Deletes):
    """One big file, open for life, emptied at start."""

    config: ClassVar = {"backend": "offset_allocator_storage_backend"}
    data_files = re.compile(r"/kv_cache\.data$")
    restart_warm = False
    holds_files = True
