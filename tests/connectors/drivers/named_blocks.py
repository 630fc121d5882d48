"""The verbs of a driver, for programs that store bytes under a name and give them back."""

from abc import ABC, abstractmethod

import numpy as np
from patterns import block_hash, pattern


class NamedBlocks(ABC):
    """One store, open; a subclass says how the program is called."""

    size_bytes: int

    @abstractmethod
    def put(self, name: str, data: np.ndarray) -> bool:
        """Store; whether the program says that it did."""

    @abstractmethod
    def get(self, name: str) -> np.ndarray | None:
        """The bytes of a block, None if there is none."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the program says that it is there."""

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Store blocks; ``ok`` when each of them was."""
        done = [self.put(self.name(key), pattern(key, version, self.size_bytes)) for key in keys]
        return {"ok": all(done)}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that are found."""
        return [key for key in keys if self.has(self.name(key))]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Load blocks: those that came, and those whose bytes are right."""
        loaded, intact = [], []
        for key in keys:
            data = self.get(self.name(key))
            if data is not None:
                loaded.append(key)
                if np.array_equal(data, pattern(key, version, self.size_bytes)):
                    intact.append(key)
        return {"loaded": loaded, "intact": intact}

    def name(self, key: int) -> str:
        """The name of block ``key``."""
        return block_hash(key).hex()
