"""huggingface_hub's cache: blobs, and snapshots of links to them."""

from typing import ClassVar

import pytest

from tests.connectors.connector import Connector
from tests.connectors.contract import BlockFiles, block_hash
from tests.connectors.contract_eviction import EvictedQuietly, FillsThePool

pytestmark = pytest.mark.connectors


class TestHubCache(BlockFiles, EvictedQuietly, FillsThePool):
    """A download goes to a temporary file, which is moved; a link leads to it."""

    driver: ClassVar = ("hub_cache",)
    tested_version = "huggingface_hub 2.4.0"
    times = 5

    def files(self, connector: Connector, keys: list[int]) -> dict[int, str]:
        """The blob; a link to it stays when it goes."""
        assert connector.pid
        return {key: f"blobs/{block_hash(key)}" for key in keys}


class TestHubCacheDaemonPath(TestHubCache):
    """Every byte through the daemon."""

    data_path = "daemon"
