"""What a connector sees of eviction: blocks that kvfs took, and a pool that is full.

Which tests a connector's class has says what is true of it: EvictedQuietly for those that look on
disk, EvictedAndBelieved for those that do not notice, EvictedAfterItsProcess for those whose blocks
are leased or slabs; FillsThePool or KeepsItsLimit for what happens when more is stored than fits.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from tests.connectors.connector import Connector, ConnectorFailed
from tests.connectors.contract import MIB, ConnectorContract, Start
from tests.support.mounts.mounting import Mounted, Reference, run_kvfs, workplace

#: Why nothing goes while its process lives; of a unit, the rest because of one.
_KEPT: Final = frozenset({"leased", "slab", "draft", "open", "slab_draft", "came into use"})
#: A killed process's leases end with the next look of the server's; each asking takes a while.
ASK_MAX = 40


def evict(directory: Path, *flags: str) -> dict[str, Any]:
    """Evict below ``directory``; the answer, also when nothing may go."""
    done = run_kvfs("evict", str(directory), "--json", *flags, check=False)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def skip_without_kvfs(mount: Mounted | Reference) -> None:
    """Skip on a native file system, which evicts nothing."""
    if isinstance(mount, Reference):
        pytest.skip("nobody evicts on a native file system")


class EvictedQuietly(ConnectorContract):
    """kvfs may take its blocks at any time: they become misses, and are stored again."""

    evicted: ClassVar[str] = "yes"

    def test_evicted_blocks_are_misses(
        self, start: Start, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """Some go: exactly they are misses, the others are whole, and all can be stored anew."""
        skip_without_kvfs(mount)
        connector = start()
        self.stores(connector, self.keys)
        half_bytes = self.blocks // 2 * self.size_bytes
        assert evict(kv_dir, "--bytes", str(half_bytes))["blocks"] > 0
        names = self.files(connector, self.keys)
        kept = [key for key in self.keys if list(kv_dir.rglob(f"*{names[key]}*"))]
        gone = [key for key in self.keys if key not in kept]
        assert kept
        assert gone
        self.notices(connector, kept, gone)
        evict(kv_dir)
        self.notices(connector, [], self.keys)

    def notices(self, connector: Connector, kept: list[int], gone: list[int]) -> None:
        """It finds and loads ``kept`` alone, and stores ``gone`` again."""
        assert self.hits(connector, self.keys) == kept
        assert connector.call("load", keys=gone, version=1) == {"loaded": [], "intact": []}
        self.holds(connector, kept)
        self.stores(connector, gone)
        self.holds(connector, self.keys)


class EvictedAndBelieved(EvictedQuietly):
    """It goes on believing in blocks that it has seen: loads of those that went fail, cleanly."""

    evicted = "load fails"

    def notices(self, connector: Connector, kept: list[int], gone: list[int]) -> None:
        """Loads tell ``kept`` from ``gone``, lookups do not; nothing is wrong or in doubt."""
        assert self.hits(connector, self.keys + self.absent) == self.keys
        assert connector.call("load", keys=gone, version=1) == {"loaded": [], "intact": []}
        assert connector.call("load", keys=kept, version=1) == {"loaded": kept, "intact": kept}


class EvictedAfterItsProcess(ConnectorContract):
    """Written in place: nothing goes while its process lives, everything may go afterwards."""

    evicted: ClassVar[str] = "after its process"

    def test_evicted_when_its_process_has_ended(
        self, start: Start, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """While it lives it loses nothing; killed, its files go, and a new process starts anew."""
        skip_without_kvfs(mount)
        connector = start()
        self.stores(connector, self.keys)
        alive = evict(kv_dir)
        assert self.big_files(kv_dir)
        assert set(alive["kept"]) <= _KEPT
        self.holds(connector, self.keys)
        connector.kill()
        for _ in range(ASK_MAX):
            evict(kv_dir)
            if not self.big_files(kv_dir):
                break
        assert self.big_files(kv_dir) == []
        fresh = start()
        assert self.hits(fresh, self.keys) == []
        self.stores(fresh, self.keys)
        self.holds(fresh, self.keys)

    def big_files(self, kv_dir: Path) -> list[str]:
        """The files that hold blocks."""
        found = [path for path in kv_dir.rglob("*") if path.is_file()]
        return [str(path) for path in found if path.stat().st_size >= self.size_bytes]


class SmallPool(ConnectorContract):
    """A pool that a few dozen blocks fill, for the tests of a full one."""

    pool_blocks: ClassVar[int] = 24
    full_pool_config: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the driver's ``open`` in this test."""
    kept_free_bytes: ClassVar[int] = 0
    """What the connector itself wants free, whatever the pool's size."""

    @property
    def capacity_bytes(self) -> int:
        """What the pool may hold."""
        return max(48 * MIB, self.pool_blocks * self.size_bytes) + self.kept_free_bytes

    @property
    def room_blocks(self) -> float:
        """How many blocks the pool has room for as far as the connector is concerned."""
        return (self.capacity_bytes - self.kept_free_bytes) / self.size_bytes

    @pytest.fixture
    def small(self) -> Iterator[Mounted]:
        """The small pool, mounted with the class's data path."""
        with workplace() as directory:
            (directory / "pool").mkdir()
            flags = (f"--data-path={self.data_path}", f"--capacity={self.capacity_bytes}")
            with Mounted(directory / "pool", directory / "kv", *flags) as mounted:
                yield mounted

    @pytest.fixture
    def kv_dir_full(self, small: Mounted) -> Path:
        """The connector's directory on it."""
        directory = small.path / "connector"
        directory.mkdir()
        return directory


class FillsThePool(SmallPool):
    """It stores on and on: kvfs makes room, and what is found is whole."""

    full_pool: ClassVar[str] = "yes"
    times: ClassVar[float] = 2.5
    """How often the pool's capacity is stored."""
    believes: ClassVar[bool] = False
    """Whether blocks that it has once seen stay hits."""

    def test_full_pool_takes_every_store(
        self, small: Mounted, start: Start, mount: Mounted | Reference, kv_dir_full: Path
    ) -> None:
        """Several times the pool: no store fails, the bound holds, no hit is wrong."""
        skip_without_kvfs(mount)
        count = int(self.times * self.capacity_bytes / self.size_bytes)
        connector = start(str(kv_dir_full))
        for first in range(0, count, 8):
            self.stores(connector, list(range(first, min(first + 8, count))))
            assert small.status()["used_bytes"] <= self.capacity_bytes
        every = list(range(count))
        before = self.on_disk(connector, every, kv_dir_full)
        hits = set(self.hits(connector, every))
        # One by one: where a block of a batch is gone, some connectors give up the rest of it.
        batches = [[key] for key in sorted(before)] + [sorted(set(every) - before)]
        loads = [connector.call("load", keys=keys, version=1) for keys in batches]
        # kvfs goes on making room ahead of writers: what was there may be gone by now.
        after = self.on_disk(connector, every, kv_dir_full)
        loaded = {key for done in loads for key in done["loaded"]}
        assert all(done["intact"] == done["loaded"] for done in loads)
        assert after <= loaded <= before
        assert after <= hits <= (set(every) if self.believes else before)
        assert len(after) >= 0.5 * self.capacity_bytes / self.size_bytes
        assert after & set(every[-8:])
        assert small.status()["eviction"]["blocks"] >= count - len(before) > 0
        assert small.errors() == []

    def on_disk(self, connector: Connector, keys: list[int], directory: Path) -> set[int]:
        """Those of ``keys`` that have a file."""
        there = "\n".join(str(path) for path in directory.rglob("*") if path.is_file())
        return {key for key, name in self.files(connector, keys).items() if name in there}


class KeepsItsLimit(SmallPool):
    """Its own limit, below the pool's, keeps it from ever meeting the end of it.

    ``full_pool_config`` sets that limit.
    """

    full_pool: ClassVar[str] = "own limit"

    def test_full_pool_is_never_met(
        self, small: Mounted, start: Start, mount: Mounted | Reference, kv_dir_full: Path
    ) -> None:
        """Stores go on beyond the limit: the connector removes by itself, kvfs evicts nothing."""
        skip_without_kvfs(mount)
        count = int(2 * self.room_blocks)
        connector = start(str(kv_dir_full), **self.full_pool_config)
        for first in range(0, count, 8):
            keys = list(range(first, min(first + 8, count)))
            self.stores(connector, keys)
            self.holds(connector, keys)
        status = small.status()
        assert status["eviction"]["blocks"] == 0
        assert status["used_bytes"] <= self.capacity_bytes


class RefusedByAFullPool(SmallPool):
    """Without a limit of its own it meets the end of the pool: a store fails, nothing is lost."""

    full_pool: ClassVar[str] = "store fails"

    def test_full_pool_refuses_and_loses_nothing(
        self, small: Mounted, start: Start, mount: Mounted | Reference, kv_dir_full: Path
    ) -> None:
        """A store fails, what was stored before is whole, and room that comes back is used."""
        skip_without_kvfs(mount)
        count = int(1.5 * self.room_blocks)
        stored: list[int] = []
        connector = start(str(kv_dir_full), **self.full_pool_config)
        for key in range(count):
            if not self.stored(connector, key):
                break
            stored.append(key)
        assert len(stored) >= 0.6 * self.room_blocks
        assert len(stored) < count
        done = connector.call("load", keys=stored, version=1)
        assert done == {"loaded": stored, "intact": stored}
        assert small.status()["used_bytes"] <= self.capacity_bytes

    def stored(self, connector: Connector, key: int) -> bool:
        """Store one block; whether the connector says that it did."""
        try:
            return bool(connector.call("store", keys=[key], version=1)["ok"])
        except ConnectorFailed:
            return False
