"""What the drivers of SGLang's storage classes share: configuration, names, the look at a page."""

import abc
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch
from patterns import block_hash, pattern
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig


def config_of(model: str, extra: dict[str, Any], *, mla: bool) -> HiCacheStorageConfig:
    """The configuration of rank 0 of 1, as the factory gets it; ``extra`` is the user's part."""
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model,
        extra_config=extra,
    )


class Pages(abc.ABC):
    """The pages of one storage; a subclass opens it, stores, and gets a page."""

    storage: HiCacheStorage
    size_bytes: int

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that exist, asked one by one as the prefetcher does."""
        names = self.names(keys)
        return [key for key, name in zip(keys, names, strict=True) if self.storage.exists(name)]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Get the pages one by one: those that came, and those whose bytes are right."""
        loaded, intact = [], []
        for key in keys:
            page = self.get(*self.names([key]))
            if page is None:
                continue
            loaded.append(key)
            if torch.equal(page, self.right(key, version)):
                intact.append(key)
        return {"loaded": loaded, "intact": intact}

    @abc.abstractmethod
    def get(self, name: str) -> torch.Tensor | None:
        """The page ``name``, in memory that was UNTOUCHED before; None when it is not there."""

    def names(self, keys: Sequence[int]) -> list[str]:
        """What SGLang calls the pages."""
        return [block_hash(key).hex() for key in keys]

    def right(self, key: int, version: int) -> torch.Tensor:
        """The bytes that a page must have."""
        return torch.from_numpy(pattern(key, version, self.size_bytes))


def version_of_sglang() -> str:
    """What the tests compare with the version that they were written for."""
    return importlib.metadata.version("sglang")
