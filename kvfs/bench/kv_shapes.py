"""What KV connectors store: sizes of real models, names and habits of real connectors, and bytes.

Sizes follow from the published model configurations (for each token 2 * layers * KV heads * head
size * bytes of the type), names from the connectors' sources: LMCache 0.5, vLLM 0.33, SGLang 0.5.

A block's content need not be remembered: it follows from a seed and the block's key. ``KvContent``
is made and compared at memory speed (numpy), so a load that checks every byte still measures the
file system and not the check. Pure.
"""

import enum
import hashlib
import mmap
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvfs.core.sizes import KIB, MIB
from kvfs.core.types import PAGE_BYTES, round_up

Bytes = npt.NDArray[np.uint8]

_WORD_BYTES: Final = 8


class Layout(enum.Enum):
    """The connector whose names are used, for blocks and their temporary files."""

    LMCACHE = "LMCache"
    VLLM = "vLLM"
    SGLANG = "SGLang"


class KvShape(NamedTuple):
    """The blocks of one deployment, all of one size; ``header_bytes`` are a write of their own."""

    model: str
    tokens: int
    layout: Layout
    size_bytes: int
    header_bytes: int = 0
    direct: bool = False

    @property
    def title(self) -> str:
        """Return the shape in words, for a table."""
        return f"{self.model}, {self.tokens} tokens, {self.layout.value}"


#: LMCache's fs connector writes lengths, shapes and type before the tensor.
LMCACHE_HEADER_BYTES: Final = 28

#: The sizes that matter: the smallest and the largest usual one, aligned and not aligned.
SHAPES: Final = (
    KvShape("Llama-8B-fp8-TP8", 64, Layout.LMCACHE, 512 * KIB, direct=True),
    KvShape("DeepSeek-V3", 16, Layout.SGLANG, 1_124_352),
    KvShape("Llama-8B", 16, Layout.VLLM, 2 * MIB, direct=True),
    KvShape("Qwen3-32B", 16, Layout.VLLM, 4 * MIB),
    KvShape("Llama-8B-TP8", 256, Layout.LMCACHE, 4 * MIB + 28, LMCACHE_HEADER_BYTES),
    KvShape("DeepSeek-V3", 256, Layout.LMCACHE, 17_989_632, direct=True),
)

assert all(shape.size_bytes % PAGE_BYTES == 0 for shape in SHAPES if shape.direct)


class KvBlock(NamedTuple):
    """One block by name: ``path`` and ``draft`` below the mount, ``key`` for its content."""

    shape: KvShape
    path: str
    draft: str
    key: int


def name_block(shape: KvShape, what: str) -> KvBlock:
    """Return the block identified by *what*, as a connector derives a name from tokens."""
    digest = hashlib.sha256(f"{shape.title}/{what}".encode()).hexdigest()
    key = int(digest[:16], 16)
    if shape.layout is Layout.LMCACHE:
        final = f"lmcache/{shape.model}@0x01000100@00000000@{digest}"
        return KvBlock(shape, f"{final}.data", f"{final}.tmp", key)
    if shape.layout is Layout.VLLM:
        root = f"vllm/{shape.model}_{shape.size_bytes:012x}_r0"
        final = f"{root}/{digest[:3]}/{digest[3:5]}_g0/{digest}.bin"
        return KvBlock(shape, final, f"{final}_{digest[-8:]}.tmp", key)
    return KvBlock(
        shape, f"sglang/{digest}_{shape.model}_0_1.bin", f"sglang/.{digest[:32]}.tmp", key
    )


def plan_blocks(shape: KvShape, share_bytes: int, seed: int) -> list[KvBlock]:
    """Return as many blocks of *shape* as *share_bytes* hold, and at least one."""
    count = max(1, share_bytes // shape.size_bytes)
    return [name_block(shape, f"{seed}/{number}") for number in range(count)]


def absent_blocks(block: KvBlock, count: int) -> Iterator[KvBlock]:
    """Yield *count* blocks that are never stored: a new prompt mostly asks for such."""
    for number in range(count):
        yield name_block(block.shape, f"{block.path}/absent/{number}")


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
