"""LMCache's in-process mode: the backend ``local_disk`` and the remote connector ``fs``."""

from typing import Any, ClassVar

import pytest

from tests.connectors.contract import BlockFiles, ConnectorContract, Deletes

pytestmark = pytest.mark.connectors


class LocalDisk(Deletes, ConnectorContract):
    """Written in place, the index in memory: a restart forgets everything, whatever holds it."""

    driver = ("lmcache_v1",)
    tested_version = "lmcache 0.5.6"
    restart_warm = False

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        settings = {
            "local_disk": "file://KV_DIR",
            "max_local_disk_size": 1,
            "extra_config": {"use_odirect": self.o_direct},
        }
        return {"name": "LocalDiskBackend", "settings": settings}


class TestLocalDisk(LocalDisk):
    """Through the page cache."""


class TestLocalDiskDirect(LocalDisk):
    """With O_DIRECT, in which mode it opens files without O_TRUNC."""

    o_direct = True


class FsConnector(BlockFiles, Deletes):
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
