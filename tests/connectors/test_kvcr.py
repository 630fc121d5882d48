"""KVCR, vLLM's and Dynamo's runner: a slab of a fixed size, its index in memory."""

import re
from typing import ClassVar

import pytest

from tests.connectors.contract import Start
from tests.connectors.contract_eviction import EvictedAfterItsProcess, KeepsItsLimit

pytestmark = pytest.mark.connectors


class TestKvcr(EvictedAfterItsProcess, KeepsItsLimit):
    """Its G3 by NIXL's plug-in POSIX: one descriptor for its lock, one with O_DIRECT for blocks."""

    driver: ClassVar = ("kvcr_slab",)
    config: ClassVar = {"slots": 20}
    tested_version = "kvcr 0.1.1"
    restart_warm = False
    shares_directory = False
    holds_files = True
    o_direct_too = True
    data_files: ClassVar = re.compile(r"/g3$")

    def test_the_tested_version(self, start: Start) -> None:
        """What the table says."""
        start()
        assert f"kvcr {self.opened['version']}" == self.tested_version
