"""llama.cpp's saved slots: a file of a prompt's state, written in place."""

from typing import ClassVar

import pytest

from tests.connectors.contract import MIB, BlockFiles, Start
from tests.connectors.contract_eviction import EvictedQuietly, FillsThePool

pytestmark = pytest.mark.connectors


class TestLlamaState(BlockFiles, EvictedQuietly, FillsThePool):
    """Its library, called as its server does; no leases, since the server lives on."""

    driver: ClassVar = ("llama_state",)
    config: ClassVar = {"lease": "none"}
    tested_version = "llama.cpp 0.5.0"
    size_bytes = MIB
    overwrites = True
    times = 5

    def test_the_tested_version(self, start: Start) -> None:
        """What the table says."""
        start()
        assert f"llama.cpp {self.opened['version']}" == self.tested_version


class TestLlamaStateDaemonPath(TestLlamaState):
    """Every byte through the daemon."""

    data_path = "daemon"
