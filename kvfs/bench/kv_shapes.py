"""What KV connectors store: sizes of real models, names and habits of real connectors. Pure.

Sizes follow from the published model configurations (for each token 2 * layers * KV heads * head
size * bytes of the type), names from the connectors' sources: LMCache 0.5, vLLM 0.33, SGLang 0.5.
"""

import enum
import hashlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.sizes import KIB, MIB
from kvfs.core.types import PAGE_BYTES


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
