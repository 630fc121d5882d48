"""vLLM's native offloading: the secondary tier ``fs`` of OffloadingConnector."""

from typing import ClassVar

import pytest

from tests.connectors.contract import MIB, BlockFiles, Start
from tests.connectors.contract_eviction import EvictedQuietly, FillsThePool

pytestmark = pytest.mark.connectors


class FileSystemTier(BlockFiles, EvictedQuietly, FillsThePool):
    """What both of its I/O paths share."""

    driver: ClassVar = ("vllm_fs_tier", "python")
    config: ClassVar = {"slots": 12}
    tested_version = "vllm 0.33.0"
    size_bytes = 2 * MIB
    o_direct = True

    def test_o_direct_probe(self, start: Start) -> None:
        """The manager's own probe finds that O_DIRECT works here, by the path under test."""
        start()
        native = self.driver[1] == "native"
        assert self.opened == {"version": "0.33.0", "native": native, "o_direct": True}


class TestFileSystemTierNative(FileSystemTier):
    """With vLLM's C module, which serves where vLLM is installed from its wheel."""

    driver = ("vllm_fs_tier", "native")


class TestFileSystemTierPython(FileSystemTier):
    """With the fallback in pure Python."""

    driver = ("vllm_fs_tier", "python")


class TestFileSystemTierNativeDaemonPath(TestFileSystemTierNative):
    """The C module without passthrough: every byte goes through the daemon."""

    data_path = "daemon"
