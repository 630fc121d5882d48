"""vLLM-Marconi-offload: a pool in a mapped file, found again by a manifest beside it."""

import re
from pathlib import Path
from typing import ClassVar

import pytest

from tests.connectors.contract import Start
from tests.connectors.contract_eviction import (
    EvictedAfterItsProcess,
    KeepsItsLimit,
    skip_without_kvfs,
)
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.connectors


class TestMarconi(EvictedAfterItsProcess, KeepsItsLimit):
    """Its second tier: no checksum, so whatever the manifest says is taken for true."""

    driver: ClassVar = ("marconi_pool",)
    config: ClassVar = {"slots": 20, "evict": "together"}
    tested_version = "vllm-marconi-offload 0.2.2"
    shares_directory = False
    holds_files = True
    data_files: ClassVar = re.compile(r"\.bin$")

    def test_full_pool_is_never_met(
        self, small: Mounted, start: Start, mount: Mounted | Reference, kv_dir_full: Path
    ) -> None:
        """Its pool has one size: it keeps what it likes, and none of that is wrong."""
        skip_without_kvfs(mount)
        count = 5 * int(self.room_blocks)
        connector = start(str(kv_dir_full), evict="")
        for first in range(0, count, 8):
            connector.call("store", keys=list(range(first, first + 8)), version=1)
        every = list(range(count))
        hits = self.hits(connector, every)
        assert len(hits) > self.blocks
        done = connector.call("load", keys=every, version=1)
        assert done == {"loaded": hits, "intact": hits}
        assert small.status()["eviction"]["blocks"] == 0
        assert small.status()["used_bytes"] <= self.capacity_bytes

    def test_a_killed_pool_without_the_policy_is_a_fresh_start(
        self, start: Start, mount: Mounted | Reference
    ) -> None:
        """The pool goes with its writer, and the manifest with it: no zeros that it vouches for."""
        skip_without_kvfs(mount)
        connector = start(evict="")
        self.stores(connector, self.keys)
        connector.kill()
        fresh = start(evict="")
        assert self.hits(fresh, self.keys) == []
        self.stores(fresh, self.keys)
        self.holds(fresh, self.keys)

    def test_the_tested_version(self, start: Start) -> None:
        """What the table says."""
        start()
        assert f"vllm-marconi-offload {self.opened['version']}" == self.tested_version
