"""LMCache 0.5 multi-process mode over NIXL: ``nixl_store`` and ``nixl_store_dynamic``."""

import re
from typing import Any, ClassVar

import pytest

from tests.connectors.contract import MIB, BlockFiles, Deletes, Start
from tests.connectors.contract_eviction import (
    EvictedAfterItsProcess,
    EvictedAndBelieved,
    FillsThePool,
    RefusedByAFullPool,
)
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.connectors


def nixl_store(pool_size: int) -> dict[str, Any]:
    """The adapter's settings for ``pool_size`` files of 8 MiB."""
    return {
        "type": "nixl_store",
        "backend": "POSIX",
        "pool_size": pool_size,
        "backend_params": {
            "file_path": "KV_DIR",
            "file_size": str(8 * MIB),
            "use_direct_io": "true",
        },
    }


class TestNixlStore(Deletes, EvictedAfterItsProcess, RefusedByAFullPool):
    """A fixed pool of files, open for life, its index in memory: slabs that nobody may evict."""

    driver = ("lmcache_l2",)
    tested_version = "lmcache 0.5.6, nixl 1.5.1"
    size_bytes = 2 * MIB
    o_direct = True
    restart_warm = False
    holds_files = True
    data_files = re.compile(r"/obj_\d+_")
    config: ClassVar = {"slots": 12, "align_bytes": 2 * MIB, "spec": nixl_store(pool_size=4)}
    #: More than the small pool holds.
    full_pool_config: ClassVar = {"spec": nixl_store(pool_size=8)}

    def test_full_pool_of_its_own(self, start: Start, mount: Mounted | Reference) -> None:
        """Its own space at an end: stores fail, nothing is lost, a delete makes room again."""
        connector = start()
        full = list(range(4 * 8 // 2))
        self.stores(connector, full)
        more = [len(full), len(full) + 1]
        assert not connector.call("store", keys=more, version=1)["ok"]
        self.holds(connector, full)
        connector.call("delete", keys=full[:2])
        self.stores(connector, more)
        self.holds(connector, full[2:] + more)
        if isinstance(mount, Mounted):
            assert mount.status()["eviction"]["blocks"] == 0


class TestNixlStoreDynamic(BlockFiles, Deletes, EvictedAndBelieved, FillsThePool):
    """A file for each block; what it has once seen stays in its index."""

    driver = ("lmcache_l2",)
    tested_version = "lmcache 0.5.6, nixl 1.5.1"
    o_direct = True
    forgets_vanished = False
    believes = True
    config: ClassVar = {
        "slots": 12,
        "spec": {
            "type": "nixl_store_dynamic",
            "backend": "POSIX",
            "backend_params": {
                "file_path": "KV_DIR",
                "use_direct_io": "true",
                "max_capacity_gb": "1",
            },
        },
    }
