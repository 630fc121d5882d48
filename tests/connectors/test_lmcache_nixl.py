"""LMCache 0.5 multi-process mode over NIXL: ``nixl_store`` and ``nixl_store_dynamic``."""

import re
from typing import ClassVar

import pytest

from tests.connectors.contract import MIB, BlockFiles, Deletes
from tests.connectors.contract_eviction import (
    EvictedAfterItsProcess,
    EvictedAndBelieved,
    FillsThePool,
)

pytestmark = pytest.mark.connectors


class TestNixlStore(Deletes, EvictedAfterItsProcess):
    """A fixed pool of files, open for life, its index in memory: slabs that nobody may evict."""

    driver = ("lmcache_l2",)
    tested_version = "lmcache 0.5.6, nixl 1.5.1"
    size_bytes = 2 * MIB
    o_direct = True
    restart_warm = False
    holds_files = True
    data_files = re.compile(r"/obj_\d+_")
    config: ClassVar = {
        "slots": 12,
        "align_bytes": 2 * MIB,
        "spec": {
            "type": "nixl_store",
            "backend": "POSIX",
            "pool_size": 4,
            "backend_params": {
                "file_path": "KV_DIR",
                "file_size": str(8 * MIB),
                "use_direct_io": "true",
            },
        },
    }


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
