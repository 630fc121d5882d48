"""LMCache's in-process mode: the backend ``local_disk`` and the remote connector ``fs``."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.connectors.connector import Drivers
from tests.connectors.contract import BlockFiles, Deletes
from tests.connectors.contract_eviction import (
    EvictedAfterItsProcess,
    EvictedQuietly,
    FillsThePool,
    KeepsItsLimit,
)

pytestmark = pytest.mark.connectors


class LocalDisk(BlockFiles, Deletes, EvictedAfterItsProcess, KeepsItsLimit):
    """Written in place, the index in memory: a restart forgets everything, whatever holds it."""

    driver = ("lmcache_v1",)
    tested_version = "lmcache 0.5.6"
    restart_warm = False

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        return self.with_limit(1.0)

    @property  # the pool's size follows from other attributes
    def full_pool_config(self) -> dict[str, Any]:  # type: ignore[override]
        """Three quarters of the pool, in GiB."""
        return self.with_limit(0.75 * self.capacity_bytes / (1 << 30))

    def with_limit(self, limit_gib: float) -> dict[str, Any]:
        """The driver's arguments."""
        settings = {
            "local_disk": "file://KV_DIR",
            "max_local_disk_size": limit_gib,
            "extra_config": {"use_odirect": self.o_direct},
        }
        return {"name": "LocalDiskBackend", "settings": settings}


class TestLocalDisk(LocalDisk):
    """Through the page cache."""


class TestLocalDiskDirect(LocalDisk):
    """With O_DIRECT, in which mode it opens files without O_TRUNC."""

    o_direct = True


class FsConnector(BlockFiles, Deletes, EvictedQuietly, FillsThePool):
    """A temporary file and a rename for each block, looked up on disk."""

    driver = ("lmcache_v1",)
    tested_version = "lmcache 0.5.6"
    overwrites = True
    extra: ClassVar[dict[str, Any]] = {}

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        settings = {
            "remote_storage_plugins": ["fs"],
            "remote_serde": "naive",
            "extra_config": {"remote_storage_plugin.fs.base_path": "KV_DIR", **self.extra},
        }
        return {"name": "RemoteBackend-fs", "settings": settings}


class TestFsConnector(FsConnector):
    """As it comes: 28 bytes of header before each block."""


class TestFsConnectorDirect(FsConnector):
    """With O_DIRECT, which excludes the header, and drafts in a directory of their own."""

    o_direct = True
    extra: ClassVar = {
        "save_chunk_meta": False,
        "fs_connector_use_odirect": True,
        "fs_connector_relative_tmp_dir": "drafts",
    }


@pytest.mark.parametrize("is_made", [False, True])
def test_with_o_direct_the_directory_must_be_there(
    drivers: Drivers, tmp_path: Path, is_made: bool
) -> None:
    """As docs/connectors/lmcache.md says: it asks for the block size before it would make it."""
    if is_made:
        (tmp_path / "kv").mkdir()
    connector = drivers.take("lmcache_v1")
    arguments = {"kv_dir": str(tmp_path / "kv"), "size_bytes": 2 << 20}
    try:
        connector.call("open", **arguments, **TestFsConnectorDirect().config)
        assert ("No such file or directory" in connector.log_tail()) is not is_made
    finally:
        connector.kill()
    assert (tmp_path / "kv").is_dir() is is_made
