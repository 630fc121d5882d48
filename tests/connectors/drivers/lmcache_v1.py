"""LMCache's in-process mode: the storage backends that its engine makes from a configuration.

``local_disk`` is LocalDiskBackend; ``fs`` is RemoteBackend with the plug-in FSConnector. Both take
their buffers from LocalCPUBackend, which is made with them.
"""

import asyncio
import importlib.metadata
import threading
from typing import Any

import torch
from json_lines import serve
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from patterns import UNTOUCHED, block_hash, pattern

STORE_WAIT_S = 40.0
MODEL = "meta-llama/Llama-3.1-8B"
TOKENS = 256
LAYER_BYTES = 2 * TOKENS * 4 * 128 * 2
"""Keys and values of 256 tokens, 4 heads of 128, two bytes each."""


class Backend:
    """One backend behind LMCache's own factory, with an event loop in a thread of its own."""

    def open(self, kv_dir: str, size_bytes: int, name: str, settings: dict[str, Any]) -> str:
        """Make the backend ``name``; in ``settings`` KV_DIR stands for ``kv_dir``."""
        self.size_bytes = size_bytes
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        config = LMCacheEngineConfig.from_dict(
            {
                "chunk_size": TOKENS,
                "local_cpu": False,
                "max_local_cpu_size": 0.25,
                "lmcache_instance_id": "kvfs",
                **_filled_in(settings, kv_dir),
            }
        )
        metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(size_bytes // LAYER_BYTES, 2, TOKENS, 4, 128),
            chunk_size=TOKENS,
        )
        self.shape, self.dtype = metadata.get_shapes()[0], metadata.kv_dtype
        self.backends = CreateStorageBackends(config, metadata, self.loop, dst_device="cpu")
        self.cpu, self.backend = self.backends["LocalCPUBackend"], self.backends[name]
        return importlib.metadata.version("lmcache")

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Put blocks and wait for each; ``ok`` when all of them are known afterwards."""
        ids = [self._key(key) for key in keys]
        for key, name in zip(keys, ids, strict=True):
            if isinstance(self.backend, LocalDiskBackend) and self.backend.contains(name):
                continue  # it would skip the put, and call nobody back
            done = threading.Event()
            block = self._allocate()
            _bytes_of(block).copy_(torch.from_numpy(pattern(key, version, self.size_bytes)))
            self.backend.batched_submit_put_task(
                [name], [block], on_complete_callback=lambda _, done=done: done.set()
            )
            block.ref_count_down()
            if not done.wait(STORE_WAIT_S):
                raise TimeoutError("the put did not end")
        return {"ok": all(self.backend.contains(name) for name in ids)}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that the backend contains."""
        return [key for key in keys if self.backend.contains(self._key(key))]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Get blocks in one batch: those that came, and those whose bytes are right."""
        # The pool's memory is used again and again; a get that does nothing must not look right.
        whole_pool = [self._allocate() for _ in keys]
        for block in whole_pool:
            _bytes_of(block).fill_(UNTOUCHED)
            block.ref_count_down()
        loaded, intact = [], []
        blocks = self.backend.batched_get_blocking([self._key(key) for key in keys])
        for key, block in zip(keys, blocks, strict=True):
            if block is None:
                continue
            loaded.append(key)
            right = torch.from_numpy(pattern(key, version, self.size_bytes))
            if torch.equal(_bytes_of(block), right):
                intact.append(key)
            block.ref_count_down()
        return {"loaded": loaded, "intact": intact}

    def delete(self, keys: list[int]) -> None:
        """Remove blocks, as LMCache's own eviction does."""
        for key in keys:
            assert self.backend.remove(self._key(key))

    def close(self) -> None:
        """Close the backends and end the loop."""
        for backend in self.backends.values():
            backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def _allocate(self) -> MemoryObj:
        block = self.cpu.allocate(self.shape, self.dtype, MemoryFormat.KV_2LTD)
        assert block is not None, "the staging pool is used up"
        return block

    def _key(self, key: int) -> CacheEngineKey:
        return CacheEngineKey(MODEL, 1, 0, block_hash(key), torch.bfloat16)


def _bytes_of(block: MemoryObj) -> torch.Tensor:
    tensor = block.tensor
    assert tensor is not None
    return tensor.view(-1).view(torch.uint8)


def _filled_in(value: Any, kv_dir: str) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {name: _filled_in(inner, kv_dir) for name, inner in value.items()}
    return value.replace("KV_DIR", kv_dir) if isinstance(value, str) else value


if __name__ == "__main__":
    serve(Backend(), "open", "store", "lookup", "load", "delete", "close")
