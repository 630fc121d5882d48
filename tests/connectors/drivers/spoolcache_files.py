"""SpoolCache's TokenFileStore, driven as its page mover drives it, with pages that are no GPU's.

The store comes from the wheel unchanged: locks, publication by link(2), checks, restore views.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from json_lines import serve
from patterns import block_hash, pattern
from spoolcache import HMALayout, TokenFileStore
from spoolcache.errors import ManifestError
from spoolcache.hma import GroupGeometry, LayerGeometry

TOKENS = 256
"""Of one file: the least that SpoolCache stores."""
PAGE_TOKENS = 16


def layout_of(size_bytes: int) -> HMALayout:
    """One layer of full attention, of which a file takes *size_bytes*."""
    page_bytes = size_bytes * PAGE_TOKENS // TOKENS
    layer = LayerGeometry("layer.0", "FullAttentionSpec", page_bytes)
    group = GroupGeometry(
        group_index=0,
        spec_name="FullAttentionSpec",
        block_size=PAGE_TOKENS,
        storage_block_size=PAGE_TOKENS,
        manager_page_size_bytes=page_bytes,
        dcp_replicated=False,
        dcp_shard_count=1,
        logical_tokens_per_page=PAGE_TOKENS,
        reuse_policy="full",
        reuse_window_tokens=None,
        running_state_tail_pages=0,
        is_eagle_group=False,
        layers=(layer,),
    )
    return HMALayout(num_manager_blocks=1 << 20, dcp_degree=1, groups=(group,))


def digest(text: str) -> str:
    """An identity of the rank."""
    return hashlib.sha256(text.encode()).hexdigest()


class Rank:
    """One rank of an engine, and its store."""

    def open(self, kv_dir: str, size_bytes: int, evict: dict[str, str]) -> dict[str, Any]:
        """Open the store, and let kvfs *evict* as folders of it say."""
        self.size_bytes = size_bytes
        layout = layout_of(size_bytes)
        self.files = TokenFileStore(
            kv_dir,
            layout=layout,
            expected_deployment_digest=digest("deployment"),
            expected_rank_digest=digest("rank"),
            expected_rank=0,
            expected_topology_digest=digest("topology"),
            expected_profile=layout.profile,
            expected_layout_digest=layout.digest,
        )
        for name, value in evict.items():
            os.setxattr(os.path.join(kv_dir, name), "user.kvfs.evict", value.encode())
        return {"version": importlib.metadata.version("spoolcache")}

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Store what is not there, as TokenPageMover.commit_keys does."""
        for key in keys:
            name = block_hash(key).hex()
            with self.files._exclusive():
                if self.files.valid_chunk(name, None, TOKENS) is None:
                    data = pattern(key, version, self.size_bytes).tobytes()
                    self.files.commit_chunk(name, None, TOKENS, data)
        return {"ok": True}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that are found."""
        return [key for key in keys if self.files.lookup(block_hash(key).hex()).is_hit]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Restore blocks: those that came, and those whose bytes are right."""
        loaded, intact = [], []
        for key in keys:
            data = self._restored(block_hash(key).hex())
            if data is not None:
                loaded.append(key)
                if np.array_equal(data, pattern(key, version, self.size_bytes)):
                    intact.append(key)
        return {"loaded": loaded, "intact": intact}

    def _restored(self, name: str) -> Any:  # noqa: ANN401
        found: list[np.ndarray] = []

        @contextlib.contextmanager
        def receiver(_descriptor: object) -> Iterator[Callable[[memoryview], None]]:
            yield lambda view: found.append(np.frombuffer(bytes(view), dtype=np.uint8))

        with contextlib.suppress(OSError, ManifestError), self.files.restore_view(name) as view:
            if view.result.is_hit:
                self.files.stream_objects(view.descriptors, receiver, lease=view)
                return np.concatenate(found)
        return None

    def delete(self, keys: list[int]) -> None:
        """Evict blocks by its own hand."""
        for key in keys:
            self.files.evict(block_hash(key).hex())

    def close(self) -> None:
        """Close the store."""
        self.files.close()


if __name__ == "__main__":
    serve(Rank(), "open", "store", "lookup", "load", "delete", "close")
