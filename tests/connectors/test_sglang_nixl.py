"""SGLang's HiCache with the ``nixl`` backend, NIXL's plug-in POSIX."""

from typing import ClassVar

import pytest

from tests.connectors.contract import MIB, BlockFiles
from tests.connectors.contract_eviction import EvictedAfterItsProcess, RefusedByAFullPool

pytestmark = pytest.mark.connectors

DEEPSEEK_64_TOKENS_BYTES = 4497408
"""64 tokens of DeepSeek-V3's cache, a multiple of 4096 as O_DIRECT wants it."""


class TestHiCacheNixl(BlockFiles, EvictedAfterItsProcess, RefusedByAFullPool):
    """As it comes: O_DIRECT, in place, 256 directories."""

    driver = ("sglang_nixl",)
    tested_version = "sglang 0.5.23, nixl 1.5.1"
    size_bytes = DEEPSEEK_64_TOKENS_BYTES
    blocks = 9
    overwrites = True
    o_direct = True
    config: ClassVar = {"slots": 9, "direct": True}


class TestHiCacheNixlBuffered(TestHiCacheNixl):
    """Through the page cache (``use_direct_io`` false)."""

    o_direct = False
    size_bytes = 2 * MIB
    config: ClassVar = {"slots": 9, "direct": False}
