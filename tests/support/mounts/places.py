"""Blank places for tests that need a small mount of their own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.mounts.mounting import Mounted, workplace

CAPACITY_BYTES: Final = 256 << 20


@contextlib.contextmanager
def blank_place() -> Iterator[Path]:
    """Yield a directory with a blank source ``pool`` and a mountpoint ``kv``."""
    with workplace() as directory:
        (directory / "pool").mkdir()
        (directory / "kv").mkdir()
        yield directory


def small_mount(place: Path, *flags: str) -> Mounted:
    """Return a mount of *place*'s pool, not started yet."""
    return Mounted(place / "pool", place / "kv", f"--capacity={CAPACITY_BYTES}", *flags)


def lines_of(path: Path, word: str) -> list[str]:
    """Return the log's lines that hold *word*."""
    return [line for line in path.read_text().splitlines() if word in line]
