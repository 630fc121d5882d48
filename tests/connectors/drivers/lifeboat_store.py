"""Lifeboat Cache's store, driven as its vLLM tier drives it: store, flush, keep to the capacity.

The store, its index, tier and manifest come from the wheel unchanged.
"""

import importlib.metadata
from typing import Any

import numpy as np
from json_lines import serve
from lifeboat_cache.config.schema import LifeboatConfig
from lifeboat_cache.core import ChunkKey
from lifeboat_cache.integrations.lifeboat_store import LifeboatStore
from lifeboat_cache.storage import StoreOutcome
from named_blocks import NamedBlocks
from patterns import UNTOUCHED

MODEL = "Llama-3.1-8B"


class Store(NamedBlocks):
    """One store with one tier."""

    def open(self, kv_dir: str, size_bytes: int, tier: dict[str, Any]) -> dict[str, Any]:
        """Open it with the settings of its *tier*, and read back what is there."""
        self.size_bytes = size_bytes
        said = {"name": "kvfs", "enabled": True, "path": kv_dir, **tier}
        self.blocks = LifeboatStore(
            LifeboatConfig.model_validate(
                {
                    "control_plane": {"enabled": False},
                    "storage": {
                        "write_mode": "low_latency",
                        "tiers": [said],
                        "fallback_local": {"enabled": False},
                        "shared_lookup": True,
                    },
                    "eviction": {"l1_policy": "lru", "admission": {"enabled": False}},
                    "tenancy": {"enabled": False},
                }
            )
        )
        self.blocks.recover(model_name=MODEL, kv_rank=0)
        return {
            "version": importlib.metadata.version("lifeboatcache"),
            "skipped": self.blocks.tiers.skipped,
        }

    def key(self, name: str) -> ChunkKey:
        return ChunkKey(chunk_hash=bytes.fromhex(name), model_name=MODEL)

    def put(self, name: str, data: np.ndarray) -> bool:
        outcome = self.blocks.store(self.key(name), data.tobytes(), idempotent=True)
        written = self.blocks.flush()
        self.blocks.enforce_capacity()
        return outcome is StoreOutcome.QUEUED and all(written.values())  # 0 of a tier that failed

    def get(self, name: str) -> np.ndarray | None:
        data = np.full(self.size_bytes, UNTOUCHED, dtype=np.uint8)
        return data if self.blocks.load_into(self.key(name), memoryview(data)) else None

    def has(self, name: str) -> bool:
        return bool(self.blocks.lookup(self.key(name)))

    def delete(self, keys: list[int]) -> None:
        """Remove blocks by its own hand."""
        for key in keys:
            self.blocks.delete(self.key(self.name(key)), force=True)

    def close(self) -> None:
        """Close the tier and its manifest."""
        for managed in self.blocks.tiers.managed():
            managed.tier.close()


if __name__ == "__main__":
    serve(Store(), "open", "store", "lookup", "load", "delete", "close")
