"""SGLang's HiCacheFile, driven as its backup and prefetch threads drive it: a page at a time.

The class comes from the wheel unchanged; a page is a flat uint8 tensor of ``size_bytes``.
"""

import torch
from json_lines import serve
from patterns import UNTOUCHED
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang_pages import Pages, config_of, version_of_sglang

MODEL = "meta-llama/Llama-3.1-8B"


class Storage(Pages):
    """One HiCacheFile of rank 0 of 1."""

    def open(self, kv_dir: str, size_bytes: int) -> str:
        """Build the backend as its factory would, with ``file_storage_path`` in extra_config."""
        self.size_bytes = size_bytes
        self.storage = HiCacheFile(config_of(MODEL, {"file_storage_path": kv_dir}, mla=False))
        return version_of_sglang()

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Set the pages; ``ok`` when the backend says that all of them are stored."""
        results = [
            self.storage.set(name, self.right(key, version))
            for key, name in zip(keys, self.names(keys), strict=True)
        ]
        return {"ok": all(results)}

    def get(self, name: str) -> torch.Tensor | None:
        """A page in memory of its own."""
        page = torch.full((self.size_bytes,), UNTOUCHED, dtype=torch.uint8)
        return None if self.storage.get(name, page) is None else page

    def prefix(self, keys: list[int]) -> int:
        """How many pages from the first one on are there: what the scheduler asks."""
        return self.storage.batch_exists_v2(self.names(keys)).kv_hit_pages

    def clear(self) -> bool:
        """Delete every page, which is all the deleting that SGLang does by itself."""
        return self.storage.clear()

    def close(self) -> None:
        """Nothing to stop: the backend has no threads."""


if __name__ == "__main__":
    serve(Storage(), "open", "store", "lookup", "load", "prefix", "clear", "close")
