"""vLLM's engine around its offloading tier, as far as it goes without a GPU.

The command line of docs/connectors/vllm.md goes through vLLM's own parser; its Scheduler, both
sides of OffloadingConnector, TieringOffloadingSpec, the region in /dev/shm and the tier ``fs``
are the wheel's. No model runs: a prompt's keys and values are the pattern that its tokens name.
And the copies between the GPU and the region are this file's (``Copies``), since vLLM's own want a
stream of a GPU: its ``get_worker`` refuses every other platform.
"""

import json
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.prefix) / "unpacked" / "engine"))
# For kvfs.bridges, which the configuration may name.
sys.path.append(str(Path(__file__).resolve().parents[3]))
os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import msgspec
import torch
import vllm_choice  # noqa: F401  (before vllm: it takes or refuses the C module)
import zmq
from json_lines import serve
from patterns import UNTOUCHED, pattern
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LAYERS, KV_HEADS, HEAD_SIZE = 4, 4, 128
MODEL = {
    "architectures": ["NoModel"],
    "model_type": "llama",
    "hidden_size": KV_HEADS * HEAD_SIZE,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
GPU_BLOCKS = 512
SERVED_WAIT_S = 60.0
"""A request waits for its tiers by steps of the scheduler: as many as go into this time."""


class NoModel(torch.nn.Module):
    """What vLLM asks of a model before it is loaded, and no more."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Never called: vLLM looks at the class alone."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> None:
        """Never called."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Never called."""

    def compute_logits(self, hidden_states: torch.Tensor) -> None:
        """Never called."""


class Copies(OffloadingWorker):
    """Between blocks of the "GPU" and chunks of the region, at once."""

    def __init__(self, spec: CPUOffloadingSpec, tensors: list[torch.Tensor]) -> None:
        self.blocks_per_chunk = spec.blocks_per_chunk
        self.region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        page_bytes = [tensor.shape[1] for tensor in tensors]
        self.pairs = [
            (tensor, self.region.create_next_worker_view(size_bytes * self.blocks_per_chunk))
            for tensor, size_bytes in zip(tensors, page_bytes, strict=True)
        ]
        self.done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        """Copy blocks into chunks."""
        for gpu, chunk in self._places(src_spec, dst_spec):
            chunk.copy_(gpu)
        return self._is_done(job_id)

    def submit_load(
        self,
        job_id: int,
        src_spec: CPULoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy chunks into blocks."""
        for gpu, chunk in self._places(dst_spec, src_spec):
            gpu.copy_(chunk)
        return self._is_done(job_id)

    def get_finished(self) -> list[TransferResult]:
        """The transfers since the last call."""
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Give the region back."""
        self.pairs.clear()
        self.region.cleanup()

    def _is_done(self, job_id: int) -> bool:
        self.done.append(TransferResult(job_id=job_id, success=True))
        return True

    def _places(
        self, gpu_spec: GPULoadStoreSpec, cpu_spec: CPULoadStoreSpec
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        (first_block,) = gpu_spec.block_indices
        for gpu, region in self.pairs:
            page_bytes = gpu.shape[1]
            for position, block in enumerate(gpu_spec.block_ids, first_block):
                chunk = position // self.blocks_per_chunk - first_block // self.blocks_per_chunk
                start = position % self.blocks_per_chunk * page_bytes
                row = region[int(cpu_spec.chunk_ids[chunk])]
                yield gpu[int(block)], row[start : start + page_bytes]


class Engine:
    """One scheduler and one worker."""

    worker: Any = None

    def read(self, command: str) -> dict[str, Any]:
        """What vLLM's own parser makes of a `vllm serve`, and whose connector it would load."""
        transfer = engine_args(shlex.split(command)).kv_transfer_config
        cls = KVConnectorFactory.get_connector_class(transfer)
        policy = transfer.kv_load_failure_policy
        return {"connector": cls.__name__, "role": transfer.kv_role, "policy": policy}

    def open(
        self, command: str, kv_dir: str, cpu_bytes: int, tier: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Build both from ``command``: its tier in ``kv_dir``, its memory of ``cpu_bytes``.

        ``tier``: further settings of the tier.
        """
        self.config = engine_config(command, kv_dir, cpu_bytes, tier or {})
        self.kv_caches, kv_cache_config = caches(self.config.cache_config.block_size)
        self.config.cache_config.num_gpu_blocks = GPU_BLOCKS
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.hint_counts: Counter[str] = Counter()
        self.connector = self.scheduler.connector
        self.manager = self.connector.connector_scheduler.manager
        self.worker = OffloadingConnector(self.config, KVConnectorRole.WORKER, kv_cache_config)
        spec = self.worker.connector_worker.spec
        self.pages = [cache.view(torch.int8).view(GPU_BLOCKS, -1) for cache in self.kv_caches]
        spec._worker = Copies(spec, self.pages)
        names = [f"layer.{index}" for index in range(LAYERS)]
        with set_current_vllm_config(self.config):
            self.worker.register_kv_caches(dict(zip(names, self.kv_caches, strict=True)))
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self.requests = 0
        tiers = self.manager.secondary_tiers
        return {
            "spec": type(spec).__name__,
            "tiers": [type(tier).__name__ for tier in tiers],
            "chunk_bytes": spec.kv_bytes_per_chunk,
            "chunk_tokens": spec.blocks_per_chunk * block_size,
            "o_direct": tiers[0]._use_o_direct,
            "region": spec._worker.region.mmap_path,
            "load_failure_policy": self.config.kv_transfer_config.kv_load_failure_policy,
        }

    def ask(
        self, prompt: int, tokens: int, system_tokens: int = 0, **hints: dict[str, Any]
    ) -> dict[str, Any]:
        """Serve one request of ``tokens`` tokens; how many of them came from the tier, and right.

        A token more is asked for, since the engine computes a prompt's last one itself. The first
        ``system_tokens`` are those of prompt 0. Of ``hints`` it takes ``kv_hints``, an envelope
        as a dict, and ``kv_transfer_params``.
        """
        self.requests += 1
        self.system_tokens = system_tokens
        params = SamplingParams(max_tokens=1)
        if "kv_transfer_params" in hints:
            params.extra_args = {"kv_transfer_params": hints["kv_transfer_params"]}
        request = Request(
            request_id=f"request-{self.requests}",
            prompt_token_ids=[
                self._whose(prompt, position) * 1000 + position % 997
                for position in range(tokens + 1)
            ],
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
            kv_hints=envelope(hints["kv_hints"]) if "kv_hints" in hints else None,
        )
        self.scheduler.add_request(request)
        told: dict[str, Any] = {}
        until_s = time.monotonic() + SERVED_WAIT_S
        while time.monotonic() < until_s:
            self._step(prompt, told)
            if not self.scheduler.requests and not self.connector.connector_scheduler._jobs:
                break
        else:
            raise TimeoutError("the request was not served")
        return told

    def settle(self) -> None:
        """Let the tiers finish what they were given, and learn which requests have ended.

        vLLM's engine makes such a step, too, while the scheduler has_finished_requests.
        """
        self._step(0, {})
        for tier in self.manager.secondary_tiers:
            tier.drain_jobs()
        until_s = time.monotonic() + SERVED_WAIT_S
        while time.monotonic() < until_s:
            if not self.manager.has_pending_work():
                return
            self._step(0, {})
        raise TimeoutError("a tier did not finish")

    def forget(self) -> None:
        """Drop what GPU and memory hold, so that the next request is served from the tier."""
        assert self.scheduler.reset_prefix_cache()
        for page in self.pages:
            page.fill_(UNTOUCHED - 256)
        primary = self.manager.primary_tier
        primary.reset_cache()

    def hints(self) -> dict[str, int]:
        """What vLLM's metrics say of the tier's hints, by result."""
        self._step(0, {})
        return dict(self.hint_counts)

    def forget_hints(self) -> None:
        """Let the time pass for which the tier keeps hints that nobody takes."""
        (tier,) = self.manager.secondary_tiers
        tier._hints.close()

    def read_events(self, batches: str) -> list[dict[str, Any]]:
        """What vLLM makes of messages of its format, one after the other, in hex."""
        left, decoder = bytes.fromhex(batches), msgspec.msgpack.Decoder(KVEventBatch)
        found: list[dict[str, Any]] = []
        while left:
            # msgspec decodes no stream: the next message begins like this one.
            end = left.find(left[:2], 2)
            while True:
                end = len(left) if end < 0 else end
                try:
                    batch = decoder.decode(left[:end])
                    break
                except msgspec.DecodeError:
                    if end == len(left):
                        raise
                    end = left.find(left[:2], end + 1)
            found += msgspec.to_builtins(batch.events)
            left = left[end:]
        return found

    def subscribe(self, endpoint: str, topic: str) -> None:
        """Listen as a router does."""
        self.subscriber = zmq.Context.instance().socket(zmq.SUB)
        self.subscriber.subscribe(topic)
        self.subscriber.connect(endpoint)

    def published(self) -> list[tuple[str, int, dict[str, Any]]]:
        """What has come: topic, number and event of each message."""
        found = []
        with self.subscriber as subscriber:
            while subscriber.poll(1000):
                topic, number, message = subscriber.recv_multipart()
                (event,) = self.read_events(message.hex())
                found.append((topic.decode(), int.from_bytes(number, "big"), event))
        return found

    def close(self) -> None:
        """Stop both sides, if they were started."""
        if self.worker is not None:
            self.worker.shutdown()
            self.scheduler.shutdown()
            self.worker = None

    def _whose(self, prompt: int, position: int) -> int:
        return 0 if position < self.system_tokens else prompt

    def _step(self, prompt: int, told: dict[str, Any]) -> None:
        output = self.scheduler.schedule()
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.worker.start_load_kv(ForwardContext({}, {}, {}))
        for new in output.scheduled_new_reqs:
            told.update(hit_tokens=new.num_computed_tokens)
            (blocks,) = new.block_ids
            told["intact"] = self._compute(prompt, blocks, new.num_computed_tokens)
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(output.finished_req_ids)
        worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        names = [request.request_id for request in self.scheduler.running]
        told_of = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[0] for _ in names],
                kv_connector_output=KVConnectorOutput(
                    finished_sending=sent,
                    finished_recving=received,
                    kv_connector_worker_meta=worker_meta,
                ),
            ),
        )
        for outputs in told_of.values():
            payload = outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats
            for (result,), count in (
                (payload or {}).get("data", {}).get("vllm:kvfs_hints", {}).items()
            ):
                self.hint_counts[result] += count

    def _compute(self, prompt: int, blocks: list[int], hit_tokens: int) -> bool:
        """Write the pattern into the blocks to compute; whether those that came hold theirs."""
        block_tokens = self.config.cache_config.block_size
        intact = True
        for index, block in enumerate(blocks):
            for layer, pages in enumerate(self.pages):
                page = pages[block]
                whose = self._whose(prompt, index * block_tokens)
                right = torch.from_numpy(pattern(whose * 10_000 + index, layer, page.numel())).view(
                    torch.int8
                )
                if index < hit_tokens // block_tokens:
                    intact = intact and torch.equal(page, right)
                else:
                    page.copy_(right)
        return intact


def envelope(said: dict[str, Any]) -> KvHintsEnvelope:
    """The envelope that vLLM makes of JSON."""
    actions = [KvHintAction(**action) for action in said["actions"]]
    return KvHintsEnvelope(**{**said, "actions": actions})


def engine_config(command: str, kv_dir: str, cpu_bytes: int, more: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration as its own command line makes it, for a model that is not there."""
    words = shlex.split(command)
    at = words.index("--kv-transfer-config") + 1
    transfer = json.loads(words[at])
    extra = transfer["kv_connector_extra_config"]
    tier = extra["secondary_tiers"][0]
    assert {"root_dir", "cpu_bytes_to_use"} <= {*tier, *extra}
    tier["root_dir"], extra["cpu_bytes_to_use"] = kv_dir, cpu_bytes
    tier.update(more)
    words[at] = json.dumps(transfer)
    ModelRegistry.register_model("NoModel", NoModel)
    config = engine_args([*words, "--skip-tokenizer-init"]).create_engine_config()
    # It is in blocks' names: the directory's would be another one in each process.
    config.model_config.model = "model"
    config.scheduler_config.async_scheduling = False
    return config


def engine_args(words: list[str]) -> EngineArgs:
    """The engine's part of `vllm serve MODEL FLAG...`, read as vLLM reads it, for a model here."""
    assert words[:3] == ["vllm", "serve", "MODEL"]
    model_dir = Path(tempfile.mkdtemp())
    (model_dir / "config.json").write_text(json.dumps(MODEL))
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", str(model_dir), *words[3:]]))


def caches(block_tokens: int) -> tuple[list[torch.Tensor], KVCacheConfig]:
    """The "GPU" memory of LAYERS layers, and how vLLM is told of it."""
    spec = FullAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
    )
    names = [f"layer.{index}" for index in range(LAYERS)]
    config = KVCacheConfig(
        num_blocks=GPU_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=spec.page_size_bytes * LAYERS * GPU_BLOCKS,
                layers=names,
                layer_stride=spec.page_size_bytes * GPU_BLOCKS,
                block_stride=spec.page_size_bytes,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )
    shape = (GPU_BLOCKS, 2, block_tokens, KV_HEADS, HEAD_SIZE)
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in names], config


if __name__ == "__main__":
    verbs = ("read", "open", "ask", "settle", "forget", "hints", "forget_hints", "read_events")
    serve(Engine(), *verbs, "subscribe", "published", "close")
