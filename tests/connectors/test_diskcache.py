"""diskcache: a database of keys, which is open, and a file of each value, written in place."""

import re
from typing import ClassVar

import pytest

from tests.connectors.connector import Connector
from tests.connectors.contract import MIB, BlockFiles, Deletes
from tests.connectors.contract_eviction import EvictedAndBelieved, FillsThePool

pytestmark = pytest.mark.connectors


class TestDiskcache(BlockFiles, Deletes, EvictedAndBelieved, FillsThePool):
    """Its limit above the pool: kvfs makes the space."""

    driver: ClassVar = ("diskcache_rows",)
    config: ClassVar = {"lease": "none", "limit_bytes": 1024 * MIB}
    tested_version = "diskcache 5.6.3"
    overwrites = True
    killed_warm = False  # the database goes with who was writing it
    forgets_vanished = False
    believes = True
    times = 5
    holds_files = True  # the database
    data_files: ClassVar = re.compile(r"\.val$")

    def files(self, connector: Connector, keys: list[int]) -> dict[int, str]:
        """Names at random, which the database knows."""
        return dict(connector.call("names", keys=keys))
