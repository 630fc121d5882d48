"""kvfs before an object store, as docs/connectors/object-store.md tells it: Ceph's, by S3.

LMCache's server and vLLM's tiers by the document's command lines, its host names and all, in a
network of their own.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.connectors.connector import Connector, ConnectorFailed
from tests.connectors.contract import MIB
from tests.connectors.contract_eviction import evict
from tests.connectors.lmcache_server import CHUNK_BYTES, CHUNKS_EACH, REQUESTS, client, server
from tests.support.clients.stepping import until
from tests.support.machines.object_store import ObjectStore, object_store
from tests.support.machines.own_network import Network, own_network
from tests.support.mounts.mounting import Mounted, own_tmpfs, skip_without_mounts
from tests.support.rules.documented import of

pytestmark = pytest.mark.connectors

DOCUMENT: Final = "docs/connectors/object-store.md"
BUCKET: Final = "kvcache"
CHUNKS: Final = REQUESTS * CHUNKS_EACH
#: Of vLLM: 256 tokens of 4 layers with 4 heads of 128, keys and values, two bytes each.
PROMPTS: Final = (1, 2, 3)
PROMPT_TOKENS: Final = 1024
VLLM_CHUNK_BYTES: Final = 2 * MIB
#: A lookup of a store that is not there waits for the retries of AWS's own library.
ANSWER_WAIT_S: Final = 180.0


class Tiers(NamedTuple):
    """A mount, and an object store behind it."""

    network: Network
    mounted: Mounted
    store: ObjectStore

    @property
    def inside(self) -> Sequence[str]:
        """The command that puts another one into their network."""
        return self.network.inside()

    def loads_from_store(self, before: int) -> None:
        """Wait until the store has answered more GETs than ``before``: its log is written late."""
        until(lambda: self.store.requests("GET") > before, "the store was asked")


@pytest.fixture
def tiers(connectors_python: Path) -> Iterator[Tiers]:
    """Both, empty."""
    skip_without_mounts()
    programs = connectors_python.parents[1] / "unpacked" / "ceph"
    with (
        own_network() as network,
        object_store(network, programs, BUCKET) as store,
        own_tmpfs() as source,
        Mounted(source, network.place / "kv") as mounted,
    ):
        yield Tiers(network, mounted, store)
        mounted.stop()
        assert mounted.errors() == []


def sizes(directory: Path) -> dict[str, int]:
    """The blocks in ``directory``: their names below it, without suffix, and sizes in bytes."""
    return {
        str(path.relative_to(directory).with_suffix("")): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and path.stat().st_size >= MIB
    }


class TestLMCache:
    """Its server with two L2 adapters; LMCache compares the checksums."""

    def asks(self, python: Path, tiers: Tiers, flags: list[str]) -> tuple[list[int], list[str]]:
        """Ask each prompt; chunks that the first lookup of each hit, and checksums."""
        printed = client(python, flags, tiers.inside)
        hits = re.findall(r"/cold\] LOOKUP: (\d+)/\d+ chunks hit", printed)
        assert len(hits) == REQUESTS, printed
        return [int(one) for one in hits], re.findall(r"CHECKSUM: ([0-9a-f]+)", printed)

    def stores(self, python: Path, tiers: Tiers, blocks: Path) -> set[str]:
        """Store all prompts; the checksums of what was stored."""
        with server(python, blocks, DOCUMENT, tiers.inside) as flags:
            hits, checksums = self.asks(python, tiers, flags)
        assert hits == [0] * REQUESTS
        assert len(set(checksums)) == REQUESTS
        return set(checksums)

    def test_what_kvfs_evicted_comes_from_the_object_store(
        self, connectors_python: Path, tiers: Tiers
    ) -> None:
        """Both have every block; the half that kvfs took is loaded from there, and stays there."""
        blocks = tiers.mounted.path / "lmcache"
        stored = self.stores(connectors_python, tiers, blocks)
        assert list(sizes(blocks).values()) == [CHUNK_BYTES] * CHUNKS
        objects = tiers.store.objects(BUCKET)
        assert list(objects.values()) == [CHUNK_BYTES] * CHUNKS

        evict(blocks, "--bytes", str(CHUNKS // 2 * CHUNK_BYTES))
        left = sizes(blocks)
        assert len(left) == CHUNKS // 2
        tiers.mounted.remount()
        before = tiers.store.requests("GET")
        with server(connectors_python, blocks, DOCUMENT, tiers.inside) as flags:
            hits, checksums = self.asks(connectors_python, tiers, flags)
        assert hits == [CHUNKS_EACH] * REQUESTS
        assert set(checksums) == stored
        tiers.loads_from_store(before)
        assert sizes(blocks) == left
        assert tiers.store.objects(BUCKET) == objects

    def test_kvfs_serves_when_the_object_store_is_gone(
        self, connectors_python: Path, tiers: Tiers
    ) -> None:
        """After three failures LMCache asks it no more, and all comes from kvfs."""
        blocks = tiers.mounted.path / "lmcache"
        stored = self.stores(connectors_python, tiers, blocks)
        tiers.store.stop_gateway()
        with server(connectors_python, blocks, DOCUMENT, tiers.inside) as flags:
            self.asks(connectors_python, tiers, flags)
            hits, checksums = self.asks(connectors_python, tiers, flags)
        assert hits == [CHUNKS_EACH] * REQUESTS
        assert set(checksums) == stored

    def test_lookups_wait_for_an_object_store_that_hangs(
        self, connectors_python: Path, tiers: Tiers
    ) -> None:
        """Those of blocks that kvfs has, too: the trial's client does not wait, and goes on."""
        blocks = tiers.mounted.path / "lmcache"
        self.stores(connectors_python, tiers, blocks)
        with (
            server(connectors_python, blocks, DOCUMENT, tiers.inside) as flags,
            tiers.store.hung_gateway(),
        ):
            hits, _ = self.asks(connectors_python, tiers, flags)
        assert hits == [0] * REQUESTS
        assert list(sizes(blocks).values()) == [CHUNK_BYTES] * CHUNKS


class TestVLLM:
    """Its tiers `fs` and `obj`, in its engine, as test_vllm_engine.py runs it."""

    @contextmanager
    def engine(self, python: Path, tiers: Tiers) -> Iterator[Connector]:
        """An engine by the document's command line, with the document's environment."""
        exported = " ".join(of(DOCUMENT, "export AWS_"))
        (command,) = of(DOCUMENT, "vllm serve ")
        variables = [word for word in shlex.split(exported) if word.startswith("AWS_")]
        prefix = (*tiers.inside, "env", *variables)
        directory = tiers.mounted.path / "vllm"
        engine = Connector(python, "vllm_engine", "native", wait_s=ANSWER_WAIT_S, prefix=prefix)
        region: Path | None = None
        try:
            opened = engine.call("open", command=command, kv_dir=str(directory), cpu_bytes=64 * MIB)
            region = Path(opened["region"])
            assert opened["tiers"] == ["FileSystemTierManager", "ObjectStoreSecondaryTierManager"]
            yield engine
        finally:
            engine.kill()
            if region is not None:
                region.unlink(missing_ok=True)

    def asks(self, engine: Connector) -> list[int]:
        """Ask each prompt, and forget it; how many tokens of each came from the tiers, right."""
        told = [engine.call("ask", prompt=one, tokens=PROMPT_TOKENS) for one in PROMPTS]
        assert all(one["intact"] for one in told), told
        engine.call("settle")
        engine.call("forget")
        return [one["hit_tokens"] for one in told]

    def test_what_kvfs_evicted_comes_from_the_object_store(
        self, connectors_python: Path, tiers: Tiers
    ) -> None:
        """Both have every chunk, by one name; a killed engine's successor is served from both."""
        directory = tiers.mounted.path / "vllm"
        whole = [PROMPT_TOKENS] * len(PROMPTS)
        with self.engine(connectors_python, tiers) as engine:
            assert self.asks(engine) == [0] * len(PROMPTS)
            stored = sizes(directory)
            assert list(stored.values()) == [VLLM_CHUNK_BYTES] * CHUNKS
            objects = tiers.store.objects(BUCKET)
            assert {Path(name).stem for name in objects} == {Path(name).name for name in stored}
            evict(directory, "--bytes", str(CHUNKS // 2 * VLLM_CHUNK_BYTES))
            left = sizes(directory)
            assert len(left) == CHUNKS // 2
            before = tiers.store.requests("GET")
            assert self.asks(engine) == whole, engine.log_tail()
            tiers.loads_from_store(before)
        tiers.mounted.remount()
        with self.engine(connectors_python, tiers) as engine:
            assert self.asks(engine) == whole, engine.log_tail()
        assert sizes(directory) == left

    def test_kvfs_serves_when_the_object_store_is_gone_or_hangs(
        self, connectors_python: Path, tiers: Tiers
    ) -> None:
        """vLLM asks the second tier for what the first lacks, and for nothing else."""
        directory = tiers.mounted.path / "vllm"
        whole = [PROMPT_TOKENS] * len(PROMPTS)
        with self.engine(connectors_python, tiers) as engine:
            assert self.asks(engine) == [0] * len(PROMPTS)
            with tiers.store.hung_gateway():
                assert self.asks(engine) == whole, engine.log_tail()
            tiers.store.stop_gateway()
            assert self.asks(engine) == whole, engine.log_tail()
            # What is nowhere is computed and stored in kvfs again.
            evict(directory, "--bytes", str(CHUNKS // 2 * VLLM_CHUNK_BYTES))
            assert self.asks(engine) != whole
            assert len(sizes(directory)) == CHUNKS
            assert self.asks(engine) == whole, engine.log_tail()

    def test_does_not_start_without_the_object_store(
        self, connectors_python: Path, tiers: Tiers
    ) -> None:
        tiers.store.stop_gateway()
        with (
            pytest.raises(ConnectorFailed, match="Object store tier connectivity probe failed"),
            self.engine(connectors_python, tiers),
        ):
            pass
