"""SpoolCache: a file of each chunk of tokens, published by link(2); locks on files beside them."""

import shlex
from typing import ClassVar

import pytest

from tests.connectors.contract import BlockFiles, Deletes, Start
from tests.connectors.contract_eviction import EvictedQuietly, FillsThePool
from tests.connectors.document import example

pytestmark = pytest.mark.connectors


def evict_policies() -> dict[str, str]:
    """Return what docs/connectors/spoolcache.md sets, by folder of a rank."""
    said: dict[str, str] = {}
    for line in example("setfattr", "/kv/spoolcache").splitlines():
        *_, value, path = shlex.split(line)
        said[path.rpartition("/rank-*/")[2].removeprefix("/kv/spoolcache")] = value
    assert said == {"": "never", "manifests": "auto"}
    return said


class TestSpoolCache(BlockFiles, Deletes, EvictedQuietly, FillsThePool):
    """Its store of token files, which the vLLM connector gives pages to."""

    driver: ClassVar = ("spoolcache_files",)
    config: ClassVar = {"evict": evict_policies()}
    tested_version = "spoolcache 0.3.0"
    holds_files = True  # a lock file

    def test_the_tested_version(self, start: Start) -> None:
        """What the table says."""
        start()
        assert f"spoolcache {self.opened['version']}" == self.tested_version


class TestSpoolCacheDaemonPath(TestSpoolCache):
    """Without passthrough: every byte goes through the daemon."""

    data_path = "daemon"
