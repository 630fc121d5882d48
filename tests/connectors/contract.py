"""What every connector must be able to do on a mount, written once.

A connector's test class names its driver and configuration and inherits these tests; the table in
docs/connectors/README.md has a row for each class, whose cells are held by tests named after them
(``works``, ``o_direct``, ``restart_warm``, ``two_processes``, ``vanished`` here; ``evicted`` and
``full_pool`` in contract_eviction.py). Hits counted must equal stores counted, everywhere.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.connectors.connector import Connector, Drivers
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, Reference

MIB = 1 << 20
Start = Callable[..., Connector]


def block_hash(key: int) -> str:
    """The hash, in hex, by which drivers name block ``key``; it is in the file's final name."""
    return hashlib.sha256(b"kvfs-%d" % key).hexdigest()


class ConnectorContract:
    """The tests; a subclass fills in the facts of one connector in one configuration."""

    driver: ClassVar[tuple[str, ...]]
    """The file in drivers/, and arguments for it."""
    config: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the driver's ``open``."""
    data_path: ClassVar[str] = "auto"
    """kvfs's data path: passthrough wherever the kernel has it, or ``daemon``."""
    size_bytes: ClassVar[int] = 2 * MIB
    blocks: ClassVar[int] = 12
    overwrites: ClassVar[bool] = False
    """Whether a store of a known key replaces its bytes; else it is skipped."""
    restart_warm: ClassVar[bool] = True
    """Whether a new process of the connector finds what an earlier one stored."""
    killed_warm: ClassVar[bool] = True
    """Whether it also does if that one was killed; else it finds nothing, and begins anew."""
    o_direct: ClassVar[bool] = False
    """Whether it is configured to read and write past the page cache."""
    o_direct_too: ClassVar[bool] = False
    """Whether it opens a file both ways, or in the way that the moment calls for."""
    shares_directory: ClassVar[bool] = True
    """Whether several processes may work in one directory."""
    quick_start: ClassVar[bool] = False
    """Whether a new process for each test is cheaper than closing the connector in an old one."""
    data_files: ClassVar[re.Pattern[str]] = re.compile(r"[0-9a-f]{64}")
    """What is in the paths of files with blocks in them: the block's hash, as a rule."""
    holds_files: ClassVar[bool] = False
    """Whether it keeps files open for life, so that the mount cannot go under it."""
    tested_version: ClassVar[str]
    opened: Any = None
    """What the driver's ``open`` answered last."""

    @pytest.fixture
    def start(self, drivers: Drivers, kv_dir: Path) -> Iterator[Start]:
        """Start the connector on ``kv_dir`` in a process; all of them stop with the test."""
        started: list[Connector] = []

        def start(directory: str = ".", **more: object) -> Connector:
            connector = drivers.take(*self.driver)
            started.append(connector)
            own_dir = kv_dir / directory
            own_dir.mkdir(exist_ok=True)
            arguments = {"kv_dir": str(own_dir), "size_bytes": self.size_bytes, **self.config}
            self.opened = connector.call("open", **{**arguments, **more})
            return connector

        yield start
        for connector in started:
            if self.quick_start:
                connector.kill()
            else:
                drivers.give_back(connector, *self.driver)

    @property
    def keys(self) -> list[int]:
        """The keys that a test stores."""
        return list(range(self.blocks))

    @property
    def absent(self) -> list[int]:
        """As many keys that nobody ever stores."""
        return list(range(10_000, 10_000 + self.blocks))

    def files(self, connector: Connector, keys: list[int]) -> dict[int, str]:
        """What is in the path of a block's file, by key; without those that have none."""
        assert connector.pid
        return {key: block_hash(key) for key in keys}

    def stores(self, connector: Connector, keys: list[int], version: int = 1) -> None:
        """Store ``keys``, and it says that it did."""
        done = connector.call("store", keys=keys, version=version)
        assert done["ok"], connector.log_tail()

    def hits(self, connector: Connector, keys: list[int]) -> list[int]:
        """Those of ``keys`` that a lookup finds."""
        found = connector.call("lookup", keys=keys)
        assert isinstance(found, list)
        return found

    def holds(self, connector: Connector, keys: list[int], version: int = 1) -> None:
        """Exactly ``keys`` are found, loaded, and right to the byte."""
        assert self.hits(connector, keys + self.absent) == keys, connector.log_tail()
        done = connector.call("load", keys=keys, version=version)
        assert done["loaded"] == keys, connector.log_tail()
        assert done["intact"] == keys, connector.log_tail()

    def test_works_hits_equal_stores(self, start: Start, kv_dir: Path) -> None:
        """Nothing is found before, exactly what was stored after, and no draft is left."""
        connector = start()
        assert self.hits(connector, self.keys) == []
        self.stores(connector, self.keys)
        self.holds(connector, self.keys)
        left = [name for _, _, names in os.walk(kv_dir) for name in names if ".tmp" in name]
        assert left == []

    def test_works_absent_block_is_a_miss(self, start: Start) -> None:
        """A load of what is not there loads nothing and leaves the connector working."""
        connector = start()
        done = connector.call("load", keys=self.absent, version=1)
        assert done == {"loaded": [], "intact": []}
        self.stores(connector, self.keys)
        self.holds(connector, self.keys)

    def test_works_store_again(self, start: Start) -> None:
        """A second store of a key does what this connector does: replace, or skip."""
        connector = start()
        self.stores(connector, self.keys, version=1)
        self.stores(connector, self.keys, version=2)
        self.holds(connector, self.keys, version=2 if self.overwrites else 1)

    def test_o_direct_as_configured(self, start: Start, kv_dir: Path) -> None:
        """Every open of a block is with O_DIRECT, or none is; or every file is opened buffered."""
        assert os.statvfs(kv_dir).f_bsize == 4096
        connector = start()
        self.stores(connector, self.keys)
        self.holds(connector, self.keys)
        opens = [
            (path, bool(flags & os.O_DIRECT))
            for path, flags in connector.opens(kv_dir)
            if self.data_files.search(path)
        ]
        assert opens
        if self.o_direct_too:
            assert {path for path, _ in opens} == {path for path, direct in opens if not direct}
        else:
            assert {direct for _, direct in opens} == {self.o_direct}

    def test_two_processes_at_once(self, start: Start) -> None:
        """Two processes store the same and different keys at once; both then read all of it."""
        one, two = start(), start("." if self.shares_directory else "two")
        third = self.blocks // 3
        first, second = self.keys[: 2 * third], self.keys[third:]
        one.send("store", keys=first, version=1)
        two.send("store", keys=second, version=1)
        one.answer()
        two.answer()
        if self.restart_warm and self.shares_directory:
            self.holds(one, self.keys)
            self.holds(two, self.keys)
        else:
            self.holds(one, first)
            self.holds(two, second)

    def test_restart_warm_connector_ended(self, start: Start) -> None:
        """The connector stops and starts: what it stored is found again, if it ever is."""
        connector = start()
        self.stores(connector, self.keys)
        connector.end()
        self.is_as_warm_as_it_gets(start(), warm=self.restart_warm)

    def test_restart_warm_connector_killed(self, start: Start, mount: Mounted | Reference) -> None:
        """The same after SIGKILL."""
        connector = start()
        self.stores(connector, self.keys)
        connector.kill()
        killed_warm = self.killed_warm or isinstance(mount, Reference)
        self.is_as_warm_as_it_gets(start(), warm=self.restart_warm and killed_warm)

    def is_as_warm_as_it_gets(self, connector: Connector, *, warm: bool) -> None:
        """All blocks for a connector that looks on disk, none for one that forgets; it works."""
        if not warm:
            assert self.hits(connector, self.keys) == []
            self.stores(connector, self.keys)
        self.holds(connector, self.keys)

    def test_restart_warm_daemon_restarted(self, start: Start, mount: Mounted | Reference) -> None:
        """kvfs stops and starts under a living connector: warm, and it goes on storing."""
        self.survives(start, mount.remount)

    def test_restart_warm_daemon_killed(self, start: Start, mount: Mounted | Reference) -> None:
        """kvfs is killed and mounted again under a living connector: the same."""
        if isinstance(mount, Reference):
            pytest.skip("no daemon on a native file system")

        def kill_and_mount() -> None:
            mount.kill_daemon()
            mount.start()

        self.survives(start, kill_and_mount)

    def test_restart_warm_server_killed_meanwhile(
        self, start: Start, mount: Mounted | Reference
    ) -> None:
        """The server alone is killed while blocks are stored, and another one goes on."""
        if isinstance(mount, Reference):
            pytest.skip("no daemon on a native file system")
        connector = start()
        half = self.blocks // 2
        self.stores(connector, self.keys[:half])
        before = sum(mount.requests().values())
        connector.send("store", keys=self.keys[half:], version=1)
        until(
            lambda: sum(mount.requests().values()) > before or connector.has_answered,
            "it stores",
        )
        mount.kill_server()
        assert connector.answer()["ok"], connector.log_tail()
        mount.follow_server()
        self.holds(connector, self.keys)

    def survives(self, start: Start, restart: Callable[[], None]) -> None:
        """Everything stored before ``restart`` is read after it, and new stores work."""
        connector = start()
        half = self.blocks // 2
        before, after = self.keys[:half], self.keys[half:]
        self.stores(connector, before)
        self.holds(connector, before)
        if self.holds_files:
            connector.end()
        restart()
        if self.holds_files:
            connector = start()
            if not self.restart_warm:
                self.stores(connector, before)
        self.holds(connector, before)
        self.stores(connector, after)
        self.holds(connector, self.keys)


class BlockFiles(ConnectorContract):
    """One more test, for connectors that make a file of each block, its hash in the name."""

    forgets_vanished: ClassVar[bool] = True
    """Whether it notices that a file it knew is gone."""

    def test_vanished_block(self, start: Start, kv_dir: Path) -> None:
        """Blocks unlinked by somebody else are misses like any other, and can be stored anew.

        Where the connector keeps believing in them, loads of them fail, and of no other block.
        """
        connector = start()
        self.stores(connector, self.keys)
        gone, kept = self.keys[::3], [key for key in self.keys if key % 3]
        for name in self.files(connector, gone).values():
            (path,) = kv_dir.rglob(f"*{name}*")
            path.unlink()
        assert connector.call("load", keys=gone, version=1)["loaded"] == []
        if self.forgets_vanished:
            self.holds(connector, kept)
            self.stores(connector, gone, version=2)
            self.holds(connector, gone, version=2)
        else:
            assert self.hits(connector, self.keys) == self.keys
            done = connector.call("load", keys=kept, version=1)
            assert done == {"loaded": kept, "intact": kept}


class Deletes(ConnectorContract):
    """One more test, for connectors that can delete single blocks."""

    def test_works_delete(self, start: Start) -> None:
        """Deleted blocks are misses; stored anew with other bytes, the new ones are read."""
        connector = start()
        self.stores(connector, self.keys)
        gone, kept = self.keys[::2], self.keys[1::2]
        connector.call("delete", keys=gone)
        self.holds(connector, kept)
        assert self.hits(connector, gone) == []
        assert connector.call("load", keys=gone, version=1)["loaded"] == []
        self.stores(connector, gone, version=2)
        self.holds(connector, gone, version=2)
