"""Bytes that tell where they belong: each page carries a name, a seed and its place."""

import os
from pathlib import Path
from typing import Final

PAGE: Final = 4096


def _page(name: str, seed: int, number: int) -> bytes:
    stamp = f"{name}:{seed}:{number}\n".encode()
    return (stamp * (PAGE // len(stamp) + 1))[:PAGE]


def stamped(name: str, size_bytes: int, seed: int = 0) -> bytes:
    """Return *size_bytes* that can be checked page by page."""
    pages = range((size_bytes + PAGE - 1) // PAGE)
    return b"".join(_page(name, seed, number) for number in pages)[:size_bytes]


def seed_of(data: bytes, name: str, size_bytes: int) -> int:
    """Return the seed that all of *data* carries. Raises AssertionError if it is not whole."""
    assert len(data) == size_bytes, f"{name}: {len(data)} of {size_bytes} bytes"
    first = data[: data.index(b"\n")].decode(errors="replace").split(":")
    assert len(first) == 3, f"{name}: no stamp but {first}"
    seed = int(first[1])
    for number in range((size_bytes + PAGE - 1) // PAGE):
        got = data[number * PAGE : (number + 1) * PAGE]
        want = _page(name, seed, number)[: len(got)]
        assert got == want, f"{name}: page {number} of seed {seed} is {got[:40]!r}"
    return seed


def state(path: str | Path) -> str:
    """Return where the block at *path* is in its life."""
    return os.getxattr(path, "user.kvfs.state").decode()
