"""The model of measure_first_token: prompts in, first tokens out, its KV state in a directory.

Runs on a Python with torch and transformers, and imports nothing of kvfs. The KV state of a prompt
is a file a layer, keys before values as plain bytes, stored as connectors do: a temporary name, one
write, a rename. Takes a JSON line on stdin for each request and answers with one.

A load has all tokens' state but computes the last one anew, as connectors do, so its logits are
compared with those of the same step from the state that the computation left in memory: bit by bit.
Those of one pass over all tokens have other last bits, since other kernels add in another order.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

#: What a shape sets of transformers' LlamaConfig. "tiny" has much KV state for little work.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    },
    "small": {
        "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    },
    "llama-3-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip

_SAME_EACH_TIME = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class Known(NamedTuple):
    """What the KV state of a prompt was when it was computed, and what it leads to."""

    digests: list[int]
    logits: torch.Tensor
    token: int


class Missing(Exception):
    """A layer of the prompt is not there."""


class Model:
    """A model of random weights with its buffers."""

    def __init__(self, shape: str, device: str, threads: int, most_tokens: int) -> None:
        torch.manual_seed(33)
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        self._dtype = torch.bfloat16 if on_gpu else torch.float32
        sizes = SHAPES[shape]
        self._layers, self._heads = sizes["num_hidden_layers"], sizes["num_key_value_heads"]
        self._head_values, self._vocabulary = sizes["head_dim"], sizes["vocab_size"]
        config = LlamaConfig(**sizes, max_position_embeddings=1 << 17, rope_theta=500000.0)
        torch.set_default_dtype(self._dtype)
        with self._device:
            self._model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        self.token_bytes = 2 * self._layers * self._heads * self._head_values * self._dtype.itemsize
        self._buffer = torch.empty(
            most_tokens * self.token_bytes, dtype=torch.uint8, pin_memory=on_gpu
        )
        self._view = memoryview(self._buffer.numpy())
        self._readers = ThreadPoolExecutor(threads)
        self._known: dict[tuple[int, int], Known] = {}
        self._computed: tuple[int, int, Layers] | None = None

    def about(self) -> dict[str, Any]:
        """Tell what computes here."""
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU"
        parameters = sum(weights.numel() for weights in self._model.parameters())
        return {
            "processor": name,
            "torch": torch.__version__,
            "dtype": str(self._dtype).removeprefix("torch."),
            "parameters": parameters,
            "layers": self._layers,
            "token_bytes": self.token_bytes,
            "layer_bytes_a_token": self.token_bytes // self._layers,
            "torch_threads": torch.get_num_threads(),
        }

    def recompute(self, prompt: int, tokens: int) -> dict[str, Any]:
        """Compute the first token of *prompt* with no cache; its KV state is kept for ``store``."""
        ids = self._ids(prompt, tokens)
        start_s = self._now_s()
        cache = DynamicCache()
        logits = self._forward(ids, cache)
        token = int(logits.argmax())
        first_token_s = self._now_s() - start_s
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        self._computed = (prompt, tokens, layers)
        # Untimed: what a load must lead to is the same last step, from this state.
        digests = [_digest(keys) ^ _digest(values) for keys, values in layers]
        step = self._last_step(ids, layers)
        known = self._known.setdefault((prompt, tokens), Known(digests, step, token))
        return {
            "first_token_s": first_token_s,
            "again_the_same": known.digests == digests and torch.equal(known.logits, step),
            "step_has_same_token": int(step.argmax()) == token,
            "step_differs_by": float((step.float() - logits.float()).abs().max()),
            "logits_reach": float(logits.float().abs().max()),
        }

    def store(self, directory: str) -> dict[str, Any]:
        """Store the KV state that was computed last."""
        assert self._computed is not None
        prompt, tokens, layers = self._computed
        start_s = self._now_s()
        writes = []
        for number, (keys, values) in enumerate(layers):
            piece, at = self._piece(number, tokens), self._at(number, tokens)
            halves = piece.view(self._dtype).view(2, *keys.shape)
            halves[0].copy_(keys)
            halves[1].copy_(values)
            path = _path(directory, prompt, tokens, number)
            writes.append(self._readers.submit(_write, path, self._view[at : at + piece.numel()]))
        for write in writes:
            write.result()
        return {"store_s": self._now_s() - start_s, "bytes": tokens * self.token_bytes}

    def load(self, directory: str, prompt: int, tokens: int) -> dict[str, Any]:
        """Compute the first token of *prompt* from its KV state in *directory*.

        When a layer is missing the answer says how many, and the time is that of finding out.
        """
        ids = self._ids(prompt, tokens)
        start_s = self._now_s()
        try:
            layers = list(self._read(directory, prompt, tokens))
        except Missing:
            missed_s = self._now_s() - start_s
            found = [os.path.exists(_path(directory, prompt, tokens, n)) for n in self._numbers()]
            return {"hit": False, "missed_s": missed_s, "missing": found.count(False)}
        load_s = self._now_s() - start_s
        logits = self._last_step(ids, layers)
        token = int(logits.argmax())
        first_token_s = self._now_s() - start_s
        known = self._known[prompt, tokens]
        digests = [_digest(keys) ^ _digest(values) for keys, values in layers]
        others = sum(a != b for a, b in zip(digests, known.digests, strict=True))
        differs_by = float((logits.float() - known.logits.float()).abs().max())
        if others or differs_by:
            what = f"{others} layers have other bytes, the logits differ by {differs_by}"
            return {"wrong": f"prompt {prompt} of {tokens} tokens: {what}"}
        return {
            "hit": True,
            "first_token_s": first_token_s,
            "load_s": load_s,
            "bytes": tokens * self.token_bytes,
            "same_token": token == known.token,
        }

    def _numbers(self) -> range:
        return range(self._layers)

    def _ids(self, prompt: int, tokens: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(prompt)
        ids = torch.randint(self._vocabulary, (1, tokens), generator=dice)
        return ids.to(self._device)

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        answer = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return answer.logits[0, -1]

    def _last_step(self, ids: torch.Tensor, layers: Layers) -> torch.Tensor:
        """Return the logits after the last token, from the state of all tokens before it."""
        cache = DynamicCache()
        for number, (keys, values) in enumerate(layers):
            cache.update(keys[:, :, :-1], values[:, :, :-1], number)
        # cuDNN's attention, which an H200 prefers, gives other last bits from run to run.
        with sdpa_kernel(_SAME_EACH_TIME):
            return self._forward(ids[:, -1:], cache)

    def _at(self, number: int, tokens: int) -> int:
        return number * tokens * self.token_bytes // self._layers

    def _piece(self, number: int, tokens: int) -> torch.Tensor:
        return self._buffer[self._at(number, tokens) : self._at(number + 1, tokens)]

    def _read(
        self, directory: str, prompt: int, tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer on the device; all readers go ahead meanwhile. Raises Missing."""
        reads = []
        for number in self._numbers():
            piece = self._view[self._at(number, tokens) : self._at(number + 1, tokens)]
            path = _path(directory, prompt, tokens, number)
            reads.append(self._readers.submit(_read, path, piece))
        try:
            for number, read in enumerate(reads):
                read.result()
                halves = self._piece(number, tokens).to(self._device, non_blocking=True)
                shape = (2, 1, self._heads, tokens, self._head_values)
                keys, values = halves.view(self._dtype).view(shape)
                yield keys, values
        finally:
            for read in reads:
                read.cancel() or read.exception()


def _path(directory: str, prompt: int, tokens: int, number: int) -> str:
    return f"{directory}/llama@{tokens}@{prompt:016x}@layer-{number:02}.kv"


def _write(path: str, data: memoryview) -> None:
    temporary = f"{path}.tmp"
    with open(temporary, "wb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
    os.rename(temporary, path)


def _read(path: str, into: memoryview) -> None:
    try:
        with open(path, "rb", buffering=0) as file:
            while into:
                count = file.readinto(into)
                if not count:
                    raise Missing
                into = into[count:]
    except FileNotFoundError:
        raise Missing from None


def _digest(values: torch.Tensor) -> int:
    """Return a number that depends on each bit of *values* and its place."""
    words = values.contiguous().view(-1).view(torch.int64)
    places = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return int((words * places).sum())


def main() -> None:
    """Make the model of the arguments, and answer requests until stdin ends."""
    # Libraries print what they like, so the answers go to a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = Model(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        try:
            answer = getattr(model, verb)(**request)
        except (OSError, torch.OutOfMemoryError) as error:
            answer = {"failed": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
