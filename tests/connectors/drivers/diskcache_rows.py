"""diskcache: a row of SQLite a key, and large values in files beside it."""

import importlib.metadata
import os

import diskcache
import numpy as np
from json_lines import serve
from named_blocks import NamedBlocks


class Rows(NamedBlocks):
    """One cache."""

    def open(
        self, kv_dir: str, size_bytes: int, limit_bytes: int, lease: str = ""
    ) -> dict[str, str]:
        """Open it in ``kv_dir``, which gives leases as *lease* says."""
        self.size_bytes = size_bytes
        if lease:
            os.setxattr(kv_dir, "user.kvfs.lease", lease.encode())
        self.cache = diskcache.Cache(kv_dir, size_limit=limit_bytes)
        return {"version": importlib.metadata.version("diskcache")}

    def put(self, name: str, data: np.ndarray) -> bool:
        return bool(self.cache.set(name, data.tobytes()))

    def get(self, name: str) -> np.ndarray | None:
        data = self.cache.get(name)
        return None if data is None else np.frombuffer(data, dtype=np.uint8)

    def has(self, name: str) -> bool:
        return name in self.cache

    def names(self, keys: list[int]) -> list[list[object]]:
        """Key and file of each of *keys* that has a row."""
        rows = self.cache._sql("SELECT key, filename FROM Cache").fetchall()
        files = dict(rows)
        return [[key, files[self.name(key)]] for key in keys if self.name(key) in files]

    def delete(self, keys: list[int]) -> None:
        """Delete blocks."""
        for key in keys:
            self.cache.delete(self.name(key))

    def close(self) -> None:
        """Close the database."""
        self.cache.close()


if __name__ == "__main__":
    serve(Rows(), "open", "store", "lookup", "load", "names", "delete", "close")
