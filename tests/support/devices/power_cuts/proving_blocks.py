"""Blocks that prove themselves: each sector says which block, version and place it belongs to.

A sector of 512 bytes is 64 words: a magic number, block, version, place, 59 words that follow from
those, and a sum over all of them. A part of a block may have another version than the rest, if it
was rewritten in place.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

SECTOR_BYTES: Final = 512
_WORDS: Final = SECTOR_BYTES // 8
_MAGIC: Final = 0x4B56_4650_524F_4F46
_SPREAD: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
#: Odd, each another, so that no two words can change places.
_FACTORS: Final = np.arange(1, 2 * _WORDS, 2, dtype=np.uint64) * _SPREAD


def sectors_of(size_bytes: int) -> int:
    """Return how many sectors hold *size_bytes*."""
    return -(-size_bytes // SECTOR_BYTES)


def made(block: int, versions: Sequence[int] | NDArray[np.uint64], size_bytes: int) -> bytes:
    """Return *size_bytes* of *block* whose sectors have these *versions*."""
    words = np.empty((len(versions), _WORDS), np.uint64)
    words[:, 0] = _MAGIC
    words[:, 1] = block
    words[:, 2] = versions
    words[:, 3] = np.arange(len(versions))
    with np.errstate(over="ignore"):
        seed = (words[:, 1] * _SPREAD + words[:, 2]) * _SPREAD + words[:, 3]
        words[:, 4:-1] = seed[:, None] * _FACTORS[4:-1]
        words[:, -1] = _sum(words)
    return words.tobytes()[:size_bytes]


def fault_of(data: bytes, block: int) -> str:
    """Return what is wrong with *data*, which is none of what *block* ever was."""
    if not data:
        return "empty"
    whole = np.frombuffer(data[: len(data) // SECTOR_BYTES * SECTOR_BYTES], np.uint64)
    words = whole.reshape(-1, _WORDS)
    if (words == 0).all(axis=1).any():
        return "zeros"
    proven = (words[:, 0] == _MAGIC) & (words[:, -1] == _sum(words))
    if not proven.all():
        return "garbled"
    if (words[:, 1] != block).any() or (words[:, 3] != np.arange(len(words))).any():
        return "another's"
    if len(set(words[:, 2].tolist())) > 1:
        return "mixed"
    return "short"


def is_proving(data: bytes | memoryview) -> bool:
    """Whether *data*, a write to a drive, begins as a sector of a block."""
    return bytes(data[:8]) == _MAGIC.to_bytes(8, "little")


def _sum(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        summed: NDArray[np.uint64] = (words[:, :-1] * _FACTORS[:-1]).sum(axis=1, dtype=np.uint64)
    return summed
