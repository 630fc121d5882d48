"""The bytes a block must hold: told by its key and version alone, so that any process can check.

Every 4 KiB of it differ from every other 4 KiB of any block: a shifted, short, stale or swapped
read never compares equal.
"""

import hashlib

import numpy as np

UNTOUCHED = 0xEE
"""What a load's buffer is filled with before it: a load that did nothing is seen."""


def pattern(key: int, version: int, size_bytes: int) -> np.ndarray:
    """The content of block ``key`` in its ``version``-th writing, as uint8."""
    rng = np.random.Generator(np.random.SFC64([key, version]))
    return np.frombuffer(bytearray(rng.bytes(size_bytes)), dtype=np.uint8)


def block_hash(key: int, digest_bytes: int = 32) -> bytes:
    """A content hash as an engine would name the block."""
    return hashlib.sha256(b"kvfs-%d" % key).digest()[:digest_bytes]
