"""kvfs's storage for SGLang, made as SGLang's factory makes a ``dynamic`` one, from its JSON.

``_create_dynamic_backend`` of ``sglang/srt/mem_cache/storage/backend_factory.py`` (0.5.23) imports
the class by the names in ``extra_config`` and calls it with the configuration and a dict. What a
request looks for is asked as SGLang's controllers ask, and the envelope is where they will put it.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from json_lines import serve
from patterns import UNTOUCHED
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageExtraInfo
from sglang_pages import Pages, config_of

sys.path.append(str(Path(__file__).resolve().parents[3]))

MODEL = "meta-llama/Llama-3.1-8B"
PAGE_TOKENS = 64


class HintedStorage(Pages):
    """One storage of rank 0 of 1."""

    def open(self, extra_config: str, kv_dir: str, size_bytes: int) -> list[str]:
        """Build it from the page's ``extra_config``, but in ``kv_dir``; return two classes."""
        self.size_bytes = size_bytes
        extra: dict[str, Any] = {**json.loads(extra_config), "file_storage_path": kv_dir}
        cls = getattr(importlib.import_module(extra["module_path"]), extra["class_name"])
        assert issubclass(cls, HiCacheFile)
        self.storage = cls(config_of(MODEL, extra, mla=False), {})
        self.storage.register_mem_pool_host(SimpleNamespace(page_size=PAGE_TOKENS))
        return [one.__name__ for one in cls.__mro__[:2]]

    def look(self, before: list[int], keys: list[int], hints: dict[str, Any] | None) -> int:
        """How many pages of a request are there, from the first of ``keys`` on."""
        extra = {} if hints is None else {"kv_hints": hints}
        info = HiCacheStorageExtraInfo(prefix_keys=self.names(before) or None, extra_info=extra)
        found = self.storage.batch_exists(self.names(keys), info)
        assert self.storage.batch_exists_v2(self.names(keys), None, info).kv_hit_pages == found
        return found

    def store(self, keys: list[int]) -> bool:
        """Back pages up, as ``_generic_page_set`` does."""
        return self.storage.batch_set(self.names(keys), [self.right(key, 1) for key in keys])

    def get(self, name: str) -> torch.Tensor | None:
        """A page in memory of its own."""
        page = torch.full((self.size_bytes,), UNTOUCHED, dtype=torch.uint8)
        return None if self.storage.get(name, page) is None else page

    def hints(self) -> dict[str, int]:
        """What became of the hints."""
        told = self.storage._hints
        return {**vars(told.counts), "unknown": told.unknown}

    def close(self) -> None:
        """Nothing to stop."""


if __name__ == "__main__":
    serve(HintedStorage(), "open", "look", "store", "load", "hints", "close")
