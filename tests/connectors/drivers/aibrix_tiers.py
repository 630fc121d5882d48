"""AIBrix's L2 connectors that take a directory, driven as its L2 cache drives them.

The argument says which: SHFS or ROCKSDB. They come from the wheel unchanged, made by its own
factory from the variables of its environment.
"""

import asyncio
import importlib.metadata
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from json_lines import serve
from named_blocks import NamedBlocks
from patterns import UNTOUCHED

BACKEND = sys.argv[2]


class Tier(NamedBlocks):
    """One connector."""

    def open(
        self, kv_dir: str, size_bytes: int, environment: dict[str, str], evict: str = ""
    ) -> dict[str, str]:
        """Open it with the *environment* that docs/connectors/aibrix.md sets, and no other place.

        The directory is given to eviction as *evict* says.
        """
        self.size_bytes = size_bytes
        os.environ.update(environment)
        os.environ[f"AIBRIX_KV_CACHE_OL_{BACKEND}_ROOT"] = kv_dir
        if evict:
            os.setxattr(kv_dir, "user.kvfs.evict", evict.encode())
        # They look at the environment when they are imported.
        from aibrix_kvcache.l2.connectors import Connector, ConnectorConfig

        self.loop = asyncio.new_event_loop()
        executor = ThreadPoolExecutor(2)
        self.tier = Connector.create(ConnectorConfig(BACKEND, "kvfs", "0", executor))
        opened = self.tier.open()
        assert opened.is_ok(), opened
        return {"version": importlib.metadata.version("aibrix-kvcache")}

    def region(self, data: np.ndarray) -> object:
        """A region of the caller's memory."""
        from aibrix_kvcache.memory import ExternalMemoryRegion

        return ExternalMemoryRegion(torch.from_numpy(data), 0, len(data))

    def put(self, name: str, data: np.ndarray) -> bool:
        done = self.tier.put(bytes.fromhex(name), self.region(data))
        return bool(self.loop.run_until_complete(done).is_ok())

    def get(self, name: str) -> np.ndarray | None:
        data = np.full(self.size_bytes, UNTOUCHED, dtype=np.uint8)
        done = self.tier.get(bytes.fromhex(name), self.region(data))
        return data if self.loop.run_until_complete(done).is_ok() else None

    def has(self, name: str) -> bool:
        done = self.tier.exists(bytes.fromhex(name))
        return bool(self.loop.run_until_complete(done).is_ok())

    def delete(self, keys: list[int]) -> None:
        """Remove blocks by its own hand."""
        for key in keys:
            self.loop.run_until_complete(self.tier.delete(bytes.fromhex(self.name(key))))

    def close(self) -> None:
        """Close it."""
        self.tier.close()


if __name__ == "__main__":
    serve(Tier(), "open", "store", "lookup", "load", "delete", "close")
