"""SGLang's HiCacheFile, driven as its backup and prefetch threads drive it: a page at a time.

The class comes from the wheel unchanged; a page is a flat uint8 tensor of ``size_bytes``.
"""

import importlib.metadata

import torch
from json_lines import serve
from patterns import UNTOUCHED, block_hash, pattern
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

MODEL = "meta-llama/Llama-3.1-8B"


class Storage:
    """One HiCacheFile of rank 0 of 1."""

    def open(self, kv_dir: str, size_bytes: int) -> str:
        """Build the backend as its factory would, with ``file_storage_path`` in extra_config."""
        self.size_bytes = size_bytes
        self.storage = HiCacheFile(
            HiCacheStorageConfig(
                tp_rank=0,
                tp_size=1,
                pp_rank=0,
                pp_size=1,
                attn_cp_rank=0,
                attn_cp_size=1,
                is_mla_model=False,
                enable_storage_metrics=False,
                is_page_first_layout=True,
                model_name=MODEL,
                extra_config={"file_storage_path": kv_dir},
            )
        )
        return importlib.metadata.version("sglang")

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Set the pages; ``ok`` when the backend says that all of them are stored."""
        results = [
            self.storage.set(
                block_hash(key).hex(),
                torch.from_numpy(pattern(key, version, self.size_bytes)),
            )
            for key in keys
        ]
        return {"ok": all(results)}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that exist, asked one by one as the prefetcher does."""
        return [key for key in keys if self.storage.exists(block_hash(key).hex())]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Get the pages: those that came, and those whose bytes are right."""
        loaded, intact = [], []
        for key in keys:
            page = torch.full((self.size_bytes,), UNTOUCHED, dtype=torch.uint8)
            if self.storage.get(block_hash(key).hex(), page) is None:
                continue
            loaded.append(key)
            if torch.equal(page, torch.from_numpy(pattern(key, version, self.size_bytes))):
                intact.append(key)
        return {"loaded": loaded, "intact": intact}

    def prefix(self, keys: list[int]) -> int:
        """How many pages from the first one on are there: what the scheduler asks."""
        names = [block_hash(key).hex() for key in keys]
        return self.storage.batch_exists_v2(names).kv_hit_pages

    def clear(self) -> bool:
        """Delete every page, which is all the deleting that SGLang does by itself."""
        return self.storage.clear()

    def close(self) -> None:
        """Nothing to stop: the backend has no threads."""


if __name__ == "__main__":
    serve(Storage(), "open", "store", "lookup", "load", "prefix", "clear", "close")
