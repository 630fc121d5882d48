"""A client of a cache that counts for itself: what it asked for, found, missed and stored."""

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class CacheClient:
    """Loads and stores blocks in one directory, as LMCache's fs connector does."""

    directory: Path
    hits: int = 0
    misses: int = 0
    loaded_bytes: int = 0
    stored: int = 0
    content: bytes = field(default=b"x" * 4096, repr=False)

    def load(self, name: str) -> bool:
        """Look for block *name* and read it; False if it is not there."""
        try:
            fd = os.open(self.directory / name, os.O_RDONLY)
        except FileNotFoundError:
            self.misses += 1
            return False
        try:
            self.loaded_bytes += len(os.read(fd, len(self.content)))
        finally:
            os.close(fd)
        self.hits += 1
        return True

    def store(self, name: str) -> None:
        """Write a temporary file, and rename it to *name*."""
        draft = self.directory / f"{name}.tmp"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(fd, self.content)
        finally:
            os.close(fd)
        os.rename(draft, self.directory / name)
        self.stored += 1

    @property
    def hit_rate(self) -> float:
        """Hits of what was asked for."""
        return self.hits / (self.hits + self.misses)
