"""A program that keeps one tensor a file, by the usual libraries: save, look, load, unlink.

The argument says which library: safetensors, torch or joblib.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from json_lines import serve
from named_blocks import NamedBlocks
from safetensors.torch import load_file, save_file

LIBRARY = sys.argv[2]
SAVE: dict[str, Callable[[torch.Tensor, str], Any]] = {
    "safetensors": lambda data, path: save_file({"kv": data}, path),
    "torch": torch.save,
    "joblib": lambda data, path: joblib.dump(data.numpy(), path),
}
LOAD: dict[str, Callable[[str], torch.Tensor]] = {
    "safetensors": lambda path: load_file(path)["kv"],
    "torch": lambda path: torch.load(path, weights_only=True),
    "joblib": lambda path: torch.from_numpy(joblib.load(path)),
}


class Tensors(NamedBlocks):
    """A directory of files."""

    def open(self, kv_dir: str, size_bytes: int, lease: str = "") -> dict[str, str]:
        """Use ``kv_dir``, which gives leases as *lease* says."""
        self.size_bytes, self.directory = size_bytes, Path(kv_dir)
        if lease:
            os.setxattr(kv_dir, "user.kvfs.lease", lease.encode())
        return {"version": importlib.metadata.version(LIBRARY)}

    def file(self, name: str) -> Path:
        return self.directory / f"{name}.{LIBRARY}"

    def put(self, name: str, data: np.ndarray) -> bool:
        SAVE[LIBRARY](torch.from_numpy(data), str(self.file(name)))
        return True

    def get(self, name: str) -> np.ndarray | None:
        try:
            return LOAD[LIBRARY](str(self.file(name))).numpy()
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        return self.file(name).exists()

    def delete(self, keys: list[int]) -> None:
        """Unlink files."""
        for key in keys:
            self.file(self.name(key)).unlink()

    def close(self) -> None:
        """Nothing is open."""


if __name__ == "__main__":
    serve(Tensors(), "open", "store", "lookup", "load", "delete", "close")
