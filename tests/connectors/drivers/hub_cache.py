"""huggingface_hub's cache: a blob of each file, and a link to it in a snapshot.

The library is the wheel's, and a server in this process is its hub: it has every file that is asked
for. A block is a file of one repository; to store it is to download it.
"""

import importlib.metadata
import os
from pathlib import Path

from hub_server import Hub, serve_hub

# It looks at the environment when it is imported.
os.environ.update(HF_ENDPOINT=serve_hub(), HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0")

import numpy as np
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from json_lines import serve
from named_blocks import NamedBlocks

REPOSITORY = "kvfs/blocks"


class Cache(NamedBlocks):
    """One cache of one user."""

    def open(self, kv_dir: str, size_bytes: int) -> dict[str, str]:
        """Use ``kv_dir`` as HF_HUB_CACHE."""
        self.size_bytes, self.directory = size_bytes, kv_dir
        return {"version": importlib.metadata.version("huggingface_hub")}

    def put(self, name: str, data: np.ndarray) -> bool:
        Hub.files[name] = data.tobytes()
        found = hf_hub_download(REPOSITORY, name, cache_dir=self.directory)
        return Path(found).exists()

    def get(self, name: str) -> np.ndarray | None:
        found = self.cached(name)
        return None if found is None else np.fromfile(found, dtype=np.uint8)

    def has(self, name: str) -> bool:
        return self.cached(name) is not None

    def cached(self, name: str) -> str | None:
        """Where it is, without a question to the hub."""
        found = try_to_load_from_cache(REPOSITORY, name, cache_dir=self.directory)
        return found if isinstance(found, str) else None

    def close(self) -> None:
        """Nothing is open."""


if __name__ == "__main__":
    serve(Cache(), "open", "store", "lookup", "load", "close")
