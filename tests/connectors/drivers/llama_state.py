"""llama.cpp's own library, called as its server calls it for ``--slot-save-path``.

The library is node-llama-cpp's prebuilt one. A small model of made-up weights computes one prompt;
the state of every other is that one with the block's bytes in place of the last layer's values, set
by ``llama_state_seq_set_data``, so that hundreds of blocks take no hundreds of computations.
"""

import ctypes
import os
import sys
import tempfile
from ctypes import c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from json_lines import serve
from named_blocks import NamedBlocks

BINARIES = Path(sys.prefix) / "unpacked" / "llama"
CONTEXT = 1024
"""Tokens."""
STATE_BYTES_A_TOKEN = 4096
"""Of two layers: keys and values of 8 heads of 64, two bytes each."""
VOCABULARY, WIDTH, LAYERS, HEADS = 256, 512, 2, 8


class Parameters(ctypes.Structure):
    """Parameters of a model or a context: the callee reads as much of it as its version has.

    A context's begin with n_ctx, n_batch, n_ubatch.
    """

    _fields_ = (("words", c_uint32 * 256),)


class Batch(ctypes.Structure):
    """struct llama_batch."""

    _fields_ = (("tokens", c_int32), ("pointers", c_void_p * 6))


def write_model(path: str) -> None:
    """Write a model of random weights."""
    rng = np.random.default_rng(7)

    def weights(rows: int) -> Any:  # noqa: ANN401
        return (rng.standard_normal((rows, WIDTH)) * 0.02).astype(np.float16)

    ones = np.ones(WIDTH, dtype=np.float32)
    model = gguf.GGUFWriter(path, "llama")
    model.add_context_length(CONTEXT)
    model.add_embedding_length(WIDTH)
    model.add_block_count(LAYERS)
    model.add_feed_forward_length(WIDTH)
    model.add_head_count(HEADS)
    model.add_head_count_kv(HEADS)
    model.add_layer_norm_rms_eps(1e-5)
    model.add_rope_dimension_count(WIDTH // HEADS)
    model.add_vocab_size(VOCABULARY)
    model.add_tokenizer_model("no_vocab")
    model.add_tensor("token_embd.weight", weights(VOCABULARY))
    model.add_tensor("output.weight", weights(VOCABULARY))
    model.add_tensor("output_norm.weight", ones)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            model.add_tensor(f"blk.{layer}.{name}.weight", weights(WIDTH))
        for name in ("attn_norm", "ffn_norm"):
            model.add_tensor(f"blk.{layer}.{name}.weight", ones)
    model.write_header_to_file()
    model.write_kv_data_to_file()
    model.write_tensors_to_file()
    model.close()


def library() -> ctypes.CDLL:
    """Load llama.cpp and its computation for this processor."""
    ctypes.CDLL(str(BINARIES / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    (ggml,) = BINARIES.glob("libggml.v*.so")
    loaded = ctypes.CDLL(str(ggml), mode=ctypes.RTLD_GLOBAL)
    loaded.ggml_backend_load_all_from_path(str(BINARIES).encode())
    (llama,) = BINARIES.glob("libllama.v*.so")
    found = ctypes.CDLL(str(llama))
    for name, answer, arguments in (
        ("llama_model_default_params", Parameters, []),
        ("llama_context_default_params", Parameters, []),
        ("llama_model_load_from_file", c_void_p, [c_char_p, Parameters]),
        ("llama_init_from_model", c_void_p, [c_void_p, Parameters]),
        ("llama_get_memory", c_void_p, [c_void_p]),
        ("llama_memory_clear", None, [c_void_p, c_bool]),
        ("llama_batch_get_one", Batch, [c_void_p, c_int32]),
        ("llama_decode", c_int32, [c_void_p, Batch]),
        ("llama_state_seq_get_size", c_size_t, [c_void_p, c_int32]),
        ("llama_state_seq_get_data", c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
        ("llama_state_seq_set_data", c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
        (
            "llama_state_seq_save_file",
            c_size_t,
            [c_void_p, c_char_p, c_int32, c_void_p, c_size_t],
        ),
        (
            "llama_state_seq_load_file",
            c_size_t,
            [c_void_p, c_char_p, c_int32, c_void_p, c_size_t, c_void_p],
        ),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = answer, arguments
    return found


class Slot(NamedBlocks):
    """A model, and one slot of a server."""

    def __init__(self) -> None:
        self.llama = library()
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            write_model(file.name)
            model = self.llama.llama_model_load_from_file(
                file.name.encode(), self.llama.llama_model_default_params()
            )
        settings = self.llama.llama_context_default_params()
        settings.words[0] = settings.words[1] = settings.words[2] = CONTEXT
        self.context = self.llama.llama_init_from_model(model, settings)
        assert self.context

    def open(self, kv_dir: str, size_bytes: int, lease: str) -> dict[str, str]:
        """Compute a prompt whose state has ``size_bytes``, and a little.

        The directory gives leases as *lease* says.
        """
        if lease:
            os.setxattr(kv_dir, "user.kvfs.lease", lease.encode())
        self.size_bytes = size_bytes // (2 * LAYERS)  # of one layer's values
        self.directory = Path(kv_dir)
        count = size_bytes // STATE_BYTES_A_TOKEN
        self.tokens = np.random.default_rng(1).integers(0, VOCABULARY, count, dtype=np.int32)
        self.forget()
        batch = self.llama.llama_batch_get_one(self.tokens.ctypes.data, count)
        assert self.llama.llama_decode(self.context, batch) == 0
        self.template = self.state()
        (version,) = BINARIES.glob("libllama.v*.so")
        return {"version": version.name.removeprefix("libllama.v").removesuffix(".so")}

    def forget(self) -> None:
        """Empty the slot."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def state(self) -> np.ndarray:
        """The state of the slot."""
        size = self.llama.llama_state_seq_get_size(self.context, 0)
        state = np.zeros(size, dtype=np.uint8)
        self.llama.llama_state_seq_get_data(self.context, state.ctypes.data, size, 0)
        return state

    def file(self, name: str) -> bytes:
        """The file of a slot, as the server makes it of a request's ``filename``."""
        return str(self.directory / f"{name}.bin").encode()

    def put(self, name: str, data: np.ndarray) -> bool:
        state = self.template.copy()
        state[-len(data) :] = data
        self.forget()
        if not self.llama.llama_state_seq_set_data(self.context, state.ctypes.data, len(state), 0):
            return False
        return bool(
            self.llama.llama_state_seq_save_file(
                self.context, self.file(name), 0, self.tokens.ctypes.data, len(self.tokens)
            )
        )

    def get(self, name: str) -> np.ndarray | None:
        self.forget()
        tokens, count = np.zeros(CONTEXT, dtype=np.int32), c_size_t()
        if not self.llama.llama_state_seq_load_file(
            self.context,
            self.file(name),
            0,
            tokens.ctypes.data,
            CONTEXT,
            ctypes.addressof(count),
        ):
            return None
        assert np.array_equal(tokens[: count.value], self.tokens)
        state = self.state()
        assert np.array_equal(state[: -self.size_bytes], self.template[: -self.size_bytes])
        return state[-self.size_bytes :]

    def has(self, name: str) -> bool:
        """The server has no lookup: a restore of a file that is not there is an error."""
        return self.get(name) is not None

    def close(self) -> None:
        """Empty the slot; the model stays."""
        self.forget()


if __name__ == "__main__":
    serve(Slot(), "open", "store", "lookup", "load", "close")
