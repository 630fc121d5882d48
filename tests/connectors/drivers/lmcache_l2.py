"""LMCache's L2 adapters (multi-process mode), driven as its storage controller drives them.

The adapter is built from its JSON spec by LMCache's own factory; blocks lie in one L1 buffer that
the adapter is told of, aligned to 4096 as LMCache's L1 is where O_DIRECT is used.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from json_lines import serve
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    wait_eventfd,
)
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import (
    parse_args_to_l2_adapters_config,
)
from patterns import UNTOUCHED, block_hash, pattern

# For kvfs.bridges, which the configuration may name.
sys.path.append(str(Path(__file__).resolve().parents[3]))

ALIGN_BYTES = 4096
TASK_WAIT_S = 40.0
MODEL = "meta-llama/Llama-3.1-8B"


class Adapter:
    """One adapter with an L1 buffer of ``slots`` blocks."""

    def open(
        self,
        kv_dir: str,
        size_bytes: int,
        slots: int,
        spec: dict[str, Any],
        align_bytes: int = ALIGN_BYTES,
    ) -> str:
        """Build the adapter from ``spec``, in which KV_DIR stands for ``kv_dir``."""
        self.salt = ""
        full = json.dumps(spec).replace("KV_DIR", kv_dir)
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[full]))
        self.size_bytes = size_bytes
        self.slots = slots
        self.spent_ns: Counter[str] = Counter()
        self.l1 = make_aligned_tensor(size_bytes * slots, align_bytes)
        desc = create_l1_memory_desc(self.l1, align_bytes=align_bytes)
        self.adapter = create_l2_adapter(config.adapters[0], l1_memory_desc=desc)
        return type(self.adapter).__name__

    def store(self, keys: list[int], version: int) -> dict[str, Any]:
        """Store blocks; ``ok`` is what the adapter said of each batch, all batches together."""
        ok, stored_bytes = True, 0
        for batch in self._batches(keys):
            blocks = make_memory_objects(self.l1, len(batch), self.size_bytes, 0)
            for key, block in zip(batch, blocks, strict=True):
                block.raw_data.copy_(torch.from_numpy(pattern(key, version, self.size_bytes)))
            started_ns = time.monotonic_ns()
            task = self.adapter.submit_store_task([self._key(key) for key in batch], blocks)
            done = self._wait(
                self.adapter.get_store_event_fd(),
                lambda task=task: self.adapter.pop_completed_store_tasks().get(task),
            )
            self.spent_ns["store"] += time.monotonic_ns() - started_ns
            ok = ok and done.is_successful()
            stored_bytes += done.bytes_transferred()
        return {"ok": ok, "stored_bytes": stored_bytes}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that the adapter finds."""
        layout = {0: MemoryLayoutDesc(shapes=[torch.Size([self.size_bytes])], dtypes=[torch.uint8])}
        ids = [self._key(key) for key in keys]
        started_ns = time.monotonic_ns()
        task = self.adapter.submit_lookup_and_lock_task(ids, layout)
        found = self._wait(
            self.adapter.get_lookup_and_lock_event_fd(),
            lambda: self.adapter.query_lookup_and_lock_result(task),
        )
        self.spent_ns["lookup"] += time.monotonic_ns() - started_ns
        hits = [key for i, key in enumerate(keys) if found.test(i)]
        self.adapter.submit_unlock([self._key(key) for key in hits])
        return hits

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Load blocks: those that the adapter says it loaded, and those whose bytes are right."""
        loaded: list[int] = []
        intact: list[int] = []
        for batch in self._batches(keys):
            blocks = make_memory_objects(self.l1, len(batch), self.size_bytes, 0)
            for block in blocks:
                block.raw_data.fill_(UNTOUCHED)
            started_ns = time.monotonic_ns()
            task = self.adapter.submit_load_task([self._key(key) for key in batch], blocks)
            done = self._wait(
                self.adapter.get_load_event_fd(),
                lambda task=task: self.adapter.query_load_result(task),
            )
            self.spent_ns["load"] += time.monotonic_ns() - started_ns
            for i, (key, block) in enumerate(zip(batch, blocks, strict=True)):
                if done.test(i):
                    loaded.append(key)
                    right = torch.from_numpy(pattern(key, version, self.size_bytes))
                    if torch.equal(block.raw_data, right):
                        intact.append(key)
        return {"loaded": loaded, "intact": intact}

    def use_salt(self, salt: str) -> None:
        """Whose blocks the keys stand for from now on."""
        self.salt = salt

    def delete(self, keys: list[int]) -> None:
        """Delete blocks, as LMCache's eviction does."""
        self.adapter.delete([self._key(key) for key in keys])

    def spent(self) -> dict[str, int]:
        """Nanoseconds that each verb has spent inside the adapter since ``open``."""
        return dict(self.spent_ns)

    def close(self) -> None:
        """Stop the adapter."""
        self.adapter.close()

    def _key(self, key: int) -> ObjectKey:
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        hashed = block_hash(key)
        return ObjectKey(hashed, model_name=MODEL, kv_rank=rank, cache_salt=self.salt)

    def _batches(self, keys: list[int]) -> Sequence[list[int]]:
        return [keys[i : i + self.slots] for i in range(0, len(keys), self.slots)]

    def _wait(self, event_fd: int, result: Callable[[], Any]) -> Any:  # noqa: ANN401
        while True:
            if not wait_eventfd(event_fd, timeout=TASK_WAIT_S):
                raise TimeoutError("the adapter did not answer")
            value = result()
            if value is not None:
                return value


if __name__ == "__main__":
    serve(Adapter(), "open", "use_salt", "store", "lookup", "load", "delete", "spent", "close")
