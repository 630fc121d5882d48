"""vLLM's OffloadingConnector by the command line of docs/connectors/vllm.md, in vLLM's engine.

Its parser, scheduler, connector and tiers are real; no model runs, and the copies between GPU and
memory are a driver's (drivers/vllm_engine.py says why).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

import pytest

from tests.connectors.connector import Connector, Drivers
from tests.connectors.contract import MIB
from tests.connectors.contract_eviction import evict, skip_without_kvfs
from tests.support.mounts.mounting import Mounted, Reference
from tests.support.rules.documented import of

pytestmark = pytest.mark.connectors

DRIVER: Final = ("vllm_engine", "native")
PROMPT_TOKENS: Final = 1024
CHUNK_TOKENS: Final = 256
CHUNK_BYTES: Final = 2 * MIB
"""256 tokens of 4 layers with 4 heads of 128, keys and values, two bytes each."""
PROMPTS: Final = (1, 2, 3)


@pytest.mark.parametrize(
    ("connector", "document"),
    [
        ("OffloadingConnector", "README.md"),
        ("OffloadingConnector", "docs/connectors/vllm.md"),
        ("OffloadingConnector", "docs/connectors/object-store.md"),
        ("OffloadingConnector", "docs/hints.md"),
        ("LMCacheMPConnector", "README.md"),
        ("LMCacheMPConnector", "docs/connectors/lmcache.md"),
    ],
)
def test_vllm_reads_the_documented_command_line(
    drivers: Drivers, connector: str, document: str
) -> None:
    """Its parser takes every word of it, and it finds the connector that it names."""
    (command,) = [text for text in of(document, "vllm serve ") if connector in text]
    engine = drivers.take(*DRIVER)
    read = engine.call("read", command=command)
    drivers.give_back(engine, *DRIVER)
    assert read == {"connector": connector, "role": "kv_both", "policy": "recompute"}


class TestOffloadingConnector:
    """One mount, on which everything is restarted."""

    data_path: ClassVar[str] = "auto"

    @pytest.fixture
    def engine(self, drivers: Drivers, kv_dir: Path) -> Iterator[Connector]:
        """An engine with its tier in ``kv_dir``."""
        engine = drivers.take(*DRIVER)
        region = self.starts(engine, kv_dir)
        yield engine
        drivers.give_back(engine, *DRIVER)
        # A killed one leaves it, as vLLM does.
        region.unlink(missing_ok=True)

    def starts(self, engine: Connector, kv_dir: Path) -> Path:
        """Start it with the document's command line, but its own place and size of memory.

        Return the file of its memory.
        """
        commands = of("docs/connectors/vllm.md", "vllm serve ")
        (command,) = [text for text in commands if "OffloadingConnector" in text]
        opened = engine.call("open", command=command, kv_dir=str(kv_dir), cpu_bytes=64 * MIB)
        region = Path(opened.pop("region"))
        assert opened == {
            "spec": "TieringOffloadingSpec",
            "tiers": ["FileSystemTierManager"],
            "chunk_bytes": CHUNK_BYTES,
            "chunk_tokens": CHUNK_TOKENS,
            "o_direct": True,
            "load_failure_policy": "recompute",
        }
        return region

    def asks(self, engine: Connector, hit_tokens: int) -> None:
        """Ask each prompt; of each so many tokens come from the tier, right to the byte."""
        for prompt in PROMPTS:
            told = engine.call("ask", prompt=prompt, tokens=PROMPT_TOKENS)
            assert told == {"hit_tokens": hit_tokens, "intact": True}, engine.log_tail()
        engine.call("settle")
        engine.call("forget")

    def chunks(self, kv_dir: Path) -> list[int]:
        """Sizes in bytes of the tier's files."""
        names = re.compile(r"[0-9a-f]{64}\.bin$")
        return [path.stat().st_size for path in kv_dir.rglob("*") if names.search(str(path))]

    def test_served_from_the_tier(self, engine: Connector, kv_dir: Path) -> None:
        """Nothing at first; then all of each prompt, from files of the size that it says."""
        self.asks(engine, hit_tokens=0)
        chunks = len(PROMPTS) * PROMPT_TOKENS // CHUNK_TOKENS
        assert self.chunks(kv_dir) == [CHUNK_BYTES] * chunks
        self.asks(engine, hit_tokens=PROMPT_TOKENS)
        told = engine.call("ask", prompt=7, tokens=PROMPT_TOKENS)
        assert told == {"hit_tokens": 0, "intact": True}

    def test_another_engine_on_a_new_mount(
        self, engine: Connector, drivers: Drivers, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """Killed, and kvfs mounted again: a new engine is served everything at once."""
        self.asks(engine, hit_tokens=0)
        engine.kill()
        mount.remount()
        fresh = drivers.take(*DRIVER)
        self.starts(fresh, kv_dir)
        self.asks(fresh, hit_tokens=PROMPT_TOKENS)
        drivers.give_back(fresh, *DRIVER)

    def test_evicted_chunks_are_computed_and_stored_again(
        self, engine: Connector, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """What kvfs took the engine computes, and the tier has it again."""
        skip_without_kvfs(mount)
        self.asks(engine, hit_tokens=0)
        assert evict(kv_dir)["blocks"] > 0
        assert self.chunks(kv_dir) == []
        self.asks(engine, hit_tokens=0)
        self.asks(engine, hit_tokens=PROMPT_TOKENS)
