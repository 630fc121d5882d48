"""vLLM's FileSystemTierManager, driven as its tiering scheduler drives it.

The manager, its thread pool, file mapper and lookup thread come from the wheel unchanged, with its
C module for I/O (``native``) or its pure-Python fallback. The primary tier is a page-aligned map.
"""

import importlib.metadata
import mmap
import time
from itertools import count
from typing import Any

import numpy as np
import vllm_choice  # noqa: F401  (before vllm: it takes or refuses the C module)
from json_lines import serve
from patterns import UNTOUCHED, block_hash, pattern
from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.base import LookupResult, OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

ANSWER_WAIT_S = 40.0
POLL_S = 0.001
"""A scheduler step: the engine polls for finished work, too."""
MODEL = "meta-llama/Llama-3.1-8B"


class Tier:
    """One tier manager with a primary tier of ``slots`` blocks."""

    def open(self, kv_dir: str, size_bytes: int, slots: int) -> dict[str, Any]:
        """Build the manager; it probes for O_DIRECT by itself, and says what it chose."""
        self.size_bytes, self.slots = size_bytes, slots
        self.ids = count()
        primary = np.frombuffer(mmap.mmap(-1, size_bytes * slots), dtype=np.uint8)
        self.primary = primary.reshape(slots, size_bytes)
        self.tier = FileSystemTierManager(
            offloading_spec=offloading_spec(size_bytes),
            primary_kv_view=memoryview(self.primary),
            tier_type="fs",
            root_dir=kv_dir,
            n_read_threads=4,
            n_write_threads=4,
        )
        return {
            "version": importlib.metadata.version("vllm"),
            "native": io._HAS_FSIO_C,
            "o_direct": self.tier._use_o_direct,
        }

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Store blocks, a job a batch; ``ok`` when every job succeeded."""
        ok = True
        for batch in self._batches(keys):
            for slot, key in enumerate(batch):
                self.primary[slot] = pattern(key, version, self.size_bytes)
            ok = self._run(batch, promote=False).success and ok
        return {"ok": ok}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that a new request finds, over as many steps as it takes."""
        request = ReqContext(req_id=f"request-{next(self.ids)}")
        self.tier.on_new_request(request)
        verdicts: dict[int, Any] = {}
        deadline_s = time.monotonic() + ANSWER_WAIT_S
        while len(verdicts) < len(keys):
            if time.monotonic() > deadline_s:
                raise TimeoutError("no verdict")
            for key in keys:
                if key not in verdicts:
                    verdict = self.tier.lookup(self._key(key), request)
                    if verdict is not LookupResult.RETRY:
                        verdicts[key] = verdict
            self.tier._lookup_manager.flush()
            time.sleep(POLL_S)
        self.tier.on_request_finished(request)
        return [key for key in keys if verdicts[key] is LookupResult.HIT]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Promote blocks: those that came, and those whose bytes are right."""
        loaded, intact = [], []
        for batch in self._batches(keys):
            self.primary.fill(UNTOUCHED)
            done = self._run(batch, promote=True)
            came = [self._key(key) for key in batch] if done.success else done.successful_keys or ()
            for slot, key in enumerate(batch):
                if self._key(key) in came:
                    loaded.append(key)
                    if np.array_equal(self.primary[slot], pattern(key, version, self.size_bytes)):
                        intact.append(key)
        return {"loaded": loaded, "intact": intact}

    def close(self) -> None:
        """Stop the manager's threads."""
        self.tier.shutdown()

    def _run(self, batch: list[int], promote: bool) -> Any:  # noqa: ANN401
        job = TransferJob(
            job_id=next(self.ids),
            keys=[self._key(key) for key in batch],
            chunk_ids=np.arange(len(batch)),
            is_promotion=promote,
            req_context=ReqContext(req_id="transfer"),
        )
        (self.tier.submit_load if promote else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (done,) = self.tier.get_finished_jobs()
        return done

    def _key(self, key: int) -> bytes:
        return make_offload_key(block_hash(key), group_idx=0)

    def _batches(self, keys: list[int]) -> list[list[int]]:
        return [keys[i : i + self.slots] for i in range(0, len(keys), self.slots)]


def offloading_spec(size_bytes: int) -> Any:  # noqa: ANN401
    """The part of an OffloadingSpec that a secondary tier reads, for one worker and one group."""

    class Spec(OffloadingSpec):
        def get_manager(self) -> Any:  # noqa: ANN401
            raise NotImplementedError

        def get_worker(self, kv_caches: Any) -> Any:  # noqa: ANN401
            raise NotImplementedError

    return Spec(
        config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(16, ("layer.0",), 0),),
            worker_kv_bytes_per_block=size_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=config.OffloadingModelConfig(name=MODEL, dtype="bfloat16"),
            cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
    )


if __name__ == "__main__":
    serve(Tier(), "open", "store", "lookup", "load", "close")
