"""vLLM-Marconi-offload's second tier: a pool in a mapped file, a manifest that says what is in it.

Scheduler and worker come from the wheel unchanged, on vLLM's own block pools and specs. What wants
a GPU is left out: a block's bytes are put into the first tier by hand, where a copy from the GPU
would put them. From there the scheduler mirrors them and the worker copies them, as in each step.
"""

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(sys.prefix) / "unpacked" / "cpu"))
os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import numpy as np
import torch
from json_lines import serve
from named_blocks import NamedBlocks
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm_marconi_offload import manager
from vllm_marconi_offload.manager import SimpleCPUOffloadScheduler
from vllm_marconi_offload.worker import SimpleCPUOffloadWorker

LAYER = "layer.0"
TOKEN_BYTES = 4096
"""Of one layer: keys and values of 8 heads of 128, two bytes each."""
FIRST_TIER = 2
"""Blocks of the first tier, one of them for nothing: what comes goes on to the second at once."""


@dataclass
class KVCacheTensor:
    """As vLLM 0.20 had it, which Marconi is made for; the pools look at none of it."""

    size: int
    shared_by: list[str]


def coordinator(*, max_num_batched_tokens: int, **more: Any) -> Any:  # noqa: ANN401
    """vLLM's own, where one argument has another name than in 0.20."""
    return get_kv_cache_coordinator(max_in_flight_tokens=max_num_batched_tokens, **more)


kv_cache_interface.KVCacheTensor = KVCacheTensor
manager.get_kv_cache_coordinator = coordinator


class Engine(NamedBlocks):
    """One scheduler and one worker."""

    def open(self, kv_dir: str, size_bytes: int, slots: int, evict: str = "") -> dict[str, str]:
        """Start both with *slots* blocks in ``kv_dir``, which eviction treats as *evict* says."""
        self.size_bytes = size_bytes
        if evict:
            os.setxattr(kv_dir, "user.kvfs.evict", evict.encode())
        tokens = size_bytes // TOKEN_BYTES
        spec = FullAttentionSpec(
            block_size=tokens, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        assert spec.page_size_bytes == size_bytes
        caches = KVCacheConfig(
            num_blocks=FIRST_TIER,
            kv_cache_tensors=[KVCacheTensor(size=FIRST_TIER * size_bytes, shared_by=[LAYER])],
            kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)],
        )
        config: Any = SimpleNamespace(
            kv_events_config=None,
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, world_size=1
            ),
            model_config=SimpleNamespace(model="Llama-3.1-8B", max_model_len=1 << 20),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=1 << 13),
            kv_transfer_config=SimpleNamespace(
                engine_id="engine",
                kv_connector_extra_config={
                    "l2_pool_path": kv_dir,
                    "l2_bytes_to_use": slots * size_bytes,
                    "l2_manifest_save_interval_s": 0,
                    "eviction_policy": "marconi",
                },
            ),
        )
        first_bytes = FIRST_TIER * size_bytes
        self.worker = SimpleCPUOffloadWorker(config, caches, first_bytes)
        page = {LAYER: torch.empty(1, size_bytes, dtype=torch.int8)}
        l2_id = self.worker._compute_l2_stable_id(slots * size_bytes, size_bytes)
        common = {"unique_gpu_caches": page, "total_bytes_per_block": size_bytes}
        self.worker.cpu_kv_caches, _ = self.worker._allocate_pool(
            "l1", None, first_bytes, **common, pin_memory=False, mmap_handles_target=[], mmap_id=""
        )
        self.worker.l2_kv_caches, _ = self.worker._allocate_pool(
            "l2",
            kv_dir,
            slots * size_bytes,
            **common,
            pin_memory=False,
            mmap_handles_target=self.worker._l2_mmap_handles,
            mmap_id=l2_id,
        )
        self.scheduler = SimpleCPUOffloadScheduler(config, caches, first_bytes, tokens, tokens)
        return {"version": importlib.metadata.version("vllm-marconi-offload")}

    def put(self, name: str, data: np.ndarray) -> bool:
        if self.has(name):
            return True
        pool, key = self.scheduler.cpu_block_pool, self.key(name)
        (block,) = pool.get_new_blocks(1)
        block._block_hash = key
        pool.cached_block_hash_to_block.insert(key, block)
        self.scheduler._eviction_policy.record_store(block.block_id, 0, bytes.fromhex(name))
        self.worker.cpu_kv_caches[LAYER][block.block_id] = torch.from_numpy(data.view(np.int8))
        pool.free_blocks([block])
        self.step()
        return self.has(name)

    def step(self) -> None:
        """What a step of the engine does about the second tier."""
        self.scheduler._maybe_checkpoint_l2_manifest()
        pairs, self.scheduler._pending_demote_pairs = self.scheduler._pending_demote_pairs, []
        self.worker.cpu_tier_move(pairs, "l1", "l2")

    def get(self, name: str) -> np.ndarray | None:
        block = self.found(name)
        if block is None:
            return None
        data: np.ndarray = self.worker.l2_kv_caches[LAYER][block.block_id].numpy().view(np.uint8)
        return data

    def has(self, name: str) -> bool:
        return self.found(name) is not None

    def found(self, name: str) -> Any:  # noqa: ANN401
        """The block of the second tier."""
        return self.scheduler.l2_block_pool.cached_block_hash_to_block.get_one_block(self.key(name))

    def key(self, name: str) -> bytes:
        """What the pools call it."""
        return make_block_hash_with_group_id(BlockHash(bytes.fromhex(name)), 0)

    def close(self) -> None:
        """Give back the mapping: nothing else is open."""
        self.worker.l2_kv_caches = None
        handles = self.worker._l2_mmap_handles
        del self.worker, self.scheduler
        for handle in handles:
            handle.close()


if __name__ == "__main__":
    serve(Engine(), "open", "store", "lookup", "load", "close")
