"""SGLang's HiCacheNixl with NIXL's plug-in POSIX, driven as its backup and prefetch threads do.

The class comes from the wheel unchanged. The host pool's class is named in annotations alone, and
its module would import the engine: an empty one stands in its place. The pool here is what such a
class offers for a page-first layout of an MLA model: one buffer, one file for each page.
"""

import sys
import types

import torch
from json_lines import serve
from patterns import UNTOUCHED

pool_host = types.ModuleType("sglang.srt.mem_cache.pool_host")
pool_host.HostKVCache = object  # type: ignore[attr-defined]
sys.modules[pool_host.__name__] = pool_host

from sglang.srt.mem_cache.storage.mmap import alloc_mmap  # noqa: E402
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl  # noqa: E402
from sglang_pages import Pages, config_of, version_of_sglang  # noqa: E402

MODEL = "deepseek-ai/DeepSeek-V3"


class HostPool:
    """Memory for ``slots`` pages, each a token of the pool as far as SGLang is concerned."""

    layout = "page_first"
    page_size = 1

    def __init__(self, slots: int, size_bytes: int) -> None:
        self.kv_buffer = alloc_mmap((slots, size_bytes), torch.uint8)

    def is_stride_page_aligned(self, alignment: int) -> bool:
        """Whether each page starts at a multiple of ``alignment``."""
        return (self.kv_buffer.data_ptr() | self.kv_buffer.stride(0)) % alignment == 0

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of pages."""
        pages = [self.kv_buffer[int(index)] for index in indices]
        return [page.data_ptr() for page in pages], [page.numel() for page in pages]


class Storage(Pages):
    """One HiCacheNixl of rank 0 of 1."""

    def open(self, kv_dir: str, size_bytes: int, slots: int, direct: bool) -> str:
        """Build the backend; its cleaner is off, which would look every 30 seconds."""
        self.size_bytes, self.slots = size_bytes, slots
        self.pool = HostPool(slots, size_bytes)
        extra = {
            "plugin": {"posix": {"active": True}},
            "use_direct_io": direct,
            "l3_cleaner_enabled": False,
        }
        self.storage = HiCacheNixl(config_of(MODEL, extra, mla=True), file_path=kv_dir)
        self.storage.register_mem_pool_host(self.pool)
        return version_of_sglang()

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Set the pages; ``ok`` when the backend says that all of them are stored."""
        results: list[bool] = []
        for batch in self._batches(keys):
            for slot, key in enumerate(batch):
                self.pool.kv_buffer[slot].copy_(self.right(key, version))
            results += self.storage.batch_set_v1(self.names(batch), torch.arange(len(batch)))
        return {"ok": all(results)}

    def get(self, name: str) -> torch.Tensor | None:
        """A page in the pool's first slot."""
        page = self.pool.kv_buffer[0]
        page.fill_(UNTOUCHED)
        return page if self.storage.batch_get_v1([name], torch.arange(1))[0] else None

    def close(self) -> None:
        """Deregister the memory."""
        self.storage.close()

    def _batches(self, keys: list[int]) -> list[list[int]]:
        return [keys[i : i + self.slots] for i in range(0, len(keys), self.slots)]


if __name__ == "__main__":
    serve(Storage(), "open", "store", "lookup", "load", "close")
