"""Bytes that need not be remembered: a block's content follows from a seed and the block's key.

Pure numpy. KvContent is made and compared at memory speed, so a load that checks every byte still
measures the file system and not the check.
"""

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

from kvfs.core.types import round_up

Bytes = npt.NDArray[np.uint8]

_WORD_BYTES: Final = 8


def aligned_buffer(size_bytes: int) -> Bytes:
    """Return a buffer of at least *size_bytes*, whole pages at a page boundary, for O_DIRECT."""
    return np.frombuffer(mmap.mmap(-1, round_up(max(1, size_bytes))), dtype=np.uint8)


class KvContent:
    """The content of any block up to ``longest_bytes``, for one seed.

    A table of random words is made once; a block's bytes are the table with every word XORed with
    the block's key. So a byte at a wrong offset differs, and so does a byte of another block.
    """

    def __init__(self, seed: int, longest_bytes: int) -> None:
        words = -(-longest_bytes // _WORD_BYTES)
        generator = np.random.Generator(np.random.SFC64(seed))
        self._table = generator.integers(0, 1 << 64, size=words, dtype=np.uint64)
        self.longest_bytes = words * _WORD_BYTES

    def fill(self, key: int, into: Bytes, size_bytes: int) -> Bytes:
        """Write the content of block *key* at the start of *into*; return that part.

        *into* holds *size_bytes* rounded up to whole words; *key* is an unsigned 64-bit number.
        """
        words = -(-size_bytes // _WORD_BYTES)
        room = into[: words * _WORD_BYTES].view(np.uint64)
        np.bitwise_xor(self._table[:words], np.uint64(key), out=room)
        return into[:size_bytes]


def first_difference(expected: Bytes, found: Bytes) -> int | None:
    """Return the offset of the first byte that differs, or None.

    If one is longer, the first difference is at the length of the shorter one, at the latest.
    """
    shorter = min(len(expected), len(found))
    if not np.array_equal(expected[:shorter], found[:shorter]):
        return int(np.argmax(expected[:shorter] != found[:shorter]))
    return None if len(expected) == len(found) else shorter
