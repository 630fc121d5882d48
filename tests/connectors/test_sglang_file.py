"""SGLang's HiCache with the ``file`` backend."""

import re
from pathlib import Path

import pytest

from tests.connectors.contract import MIB, BlockFiles, Start, block_hash
from tests.connectors.contract_eviction import EvictedQuietly, FillsThePool

pytestmark = pytest.mark.connectors


class TestHiCacheFile(BlockFiles, EvictedQuietly, FillsThePool):
    """The class HiCacheFile, with 64 tokens of Llama-3.1-8B's cache a page."""

    driver = ("sglang_file",)
    tested_version = "sglang 0.5.23"
    size_bytes = 8 * MIB
    data_files = re.compile(r"[0-9a-f]{64}|/\.[0-9a-f]{32}\.tmp$")
    blocks = 9

    def test_works_prefix_up_to_first_hole(self, start: Start, kv_dir: Path) -> None:
        """The scheduler is told the run of pages from the first on, and no more."""
        connector = start()
        assert connector.call("prefix", keys=self.keys) == 0
        self.stores(connector, self.keys)
        assert connector.call("prefix", keys=self.keys + self.absent) == self.blocks
        (hole,) = kv_dir.glob(f"{block_hash(self.keys[4])}*")
        hole.unlink()
        assert connector.call("prefix", keys=self.keys) == 4

    def test_works_clear(self, start: Start, kv_dir: Path) -> None:
        """Clearing lists the directory and unlinks all of it."""
        connector = start()
        self.stores(connector, self.keys)
        assert connector.call("clear")
        assert list(kv_dir.iterdir()) == []
        assert self.hits(connector, self.keys) == []
        self.stores(connector, self.keys, version=2)
        self.holds(connector, self.keys, version=2)


class TestHiCacheFileDaemonPath(TestHiCacheFile):
    """The same without passthrough: every byte goes through the daemon."""

    data_path = "daemon"
