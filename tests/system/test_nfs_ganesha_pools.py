"""Two pools that one Ganesha exports: a client's handle of one opens nothing in the other.

Nor in a pool that was made anew in its place. The nodes of such pools have the same numbers.
"""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from errno import EINVAL, EIO, ESTALE
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.support.kernel.calls import refused, tolerated, write_file
from tests.support.kernel.file_handles import FileHandle
from tests.support.machines.own_network import Network, own_network
from tests.support.mounts.mounting import Mounted, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount
from tests.support.nfs.client import NfsClient
from tests.support.nfs.ganesha import Export, Ganesha, why_no_ganesha

pytestmark = pytest.mark.needs_fuse

NAMES: Final = ("one", "two")
#: Blocks, among which two pools have some of the same numbers.
MORE: Final = 64
#: Of what Ganesha puts before the handle of the file system: its version and flags, then the
#: number of the export (file_handle_v3 of nfs_fh.h).
EXPORT: Final = slice(2, 4)
#: What a handle that nobody was given may be answered with.
NO_HANDLE: Final = (ESTALE, EINVAL, EIO)


class Pool(NamedTuple):
    """One of the two: where its source and its mount are."""

    place: Path
    mount: Mounted

    def fill(self, content: bytes) -> None:
        """Store a block over the one before."""
        write_file(self.mount.path / "K.tmp", content)
        (self.mount.path / "K.tmp").rename(self.mount.path / "K")

    def make_anew(self, content: bytes) -> None:
        """Put a new pool into its place."""
        self.mount.stop()
        shutil.rmtree(self.place / "pool")
        (self.place / "pool").mkdir()
        self.mount.start()
        self.fill(content)

    def fill_more(self, content: bytes) -> dict[int, tuple[Path, FileHandle]]:
        """Make more blocks with *content*; return them by the number of their node."""
        made = {}
        for number in range(MORE):
            path = self.mount.path / f"more{number}"
            write_file(path, content)
            handle = FileHandle.of(path)
            made[handle.node[0]] = path, handle
        return made


class Served(NamedTuple):
    """Both pools behind one server."""

    network: Network
    server: Ganesha
    pools: dict[str, Pool]

    def client(self, version: int, name: str) -> NfsClient:
        return NfsClient(self.network, version, f"/{name}", f"of-{name}-{version}", retries=-1)


def level(pools: dict[str, Pool]) -> None:
    """Store blocks until those of the *pools* have the same node.

    How many numbers the first one leaves out is chance: extents may be ready for it already.
    """
    for _ in range(1000):
        nodes = {(pool.mount.path / "K").stat().st_ino: name for name, pool in pools.items()}
        if len(nodes) == 1:
            return
        behind = nodes[min(nodes)]
        pools[behind].fill(behind.encode())
    raise AssertionError(f"the blocks have nodes {nodes}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    skip_without_mounts()
    assert (why := why_no_ganesha()) is None, why
    with ExitStack() as stack:
        network = stack.enter_context(own_network())
        pools = {}
        for name in NAMES:
            place = stack.enter_context(blank_place())
            mount = small_mount(place, "--set", "index_preallocate_bytes=1M")
            mount.path = network.place / name  # what is mounted there the server sees
            pools[name] = Pool(place, stack.enter_context(mount))
            pools[name].fill(name.encode())
        level(pools)
        exports = [Export(f"/{name}", pool.mount.path) for name, pool in pools.items()]
        server = stack.enter_context(Ganesha(network, tmp_path, *exports))
        yield Served(network, server, pools)


class Held(NamedTuple):
    """A client's open file, whose handle may be exchanged."""

    client: NfsClient
    file: int
    handle: bytes

    @classmethod
    def of(cls, client: NfsClient) -> "Held":
        file = client.call("open", "/K")
        return cls(client, file, client.call("handle_of", file))

    def read(self, handle: bytes) -> bytes:
        """Read what the server finds by *handle*. Raises OSError."""
        self.client.call("take_handle", self.file, handle)
        size_bytes = self.client.call("fstat", self.file).size_bytes
        found = self.client.call("pread", self.file, size_bytes, 0)
        assert isinstance(found, bytes)
        return found


def test_a_handle_of_one_pool_opens_nothing_in_the_other(served: Served) -> None:
    """[handles-pool] Whatever a client makes of two handles: the block of its own pool, or none.

    Its parts are the number of the export, the device of the mount, and what the mount gave it.
    """
    given = {name: FileHandle.of(pool.mount.path / "K") for name, pool in served.pools.items()}
    assert given["one"].node[0] == given["two"].node[0]
    with served.client(3, "one") as one, served.client(3, "two") as two:
        held = {"one": Held.of(one), "two": Held.of(two)}
        for name in NAMES:
            assert held[name].handle.count(given[name].raw) == 1
            assert held[name].read(held[name].handle) == name.encode()
        for export, device, node, asking in itertools.product(NAMES, NAMES, NAMES, NAMES):
            made = bytearray(held[device].handle.replace(given[device].raw, given[node].raw))
            made[EXPORT] = held[export].handle[EXPORT]
            if device == node:
                # The handle of a block that is there, if need be under the other's export.
                with tolerated(*(NO_HANDLE if export != device else ())):
                    assert held[asking].read(bytes(made)) == node.encode()
            else:
                with refused(*NO_HANDLE):
                    held[asking].read(bytes(made))


def test_a_handle_opens_nothing_in_a_pool_made_anew(served: Served) -> None:
    """[handles-pool] The same device, export and node: the generation tells.

    Another mount of the machine may have taken the device number meanwhile. So the handle of the
    old pool is also asked for under the number that the new one has.
    """
    with served.client(3, "one") as three:
        one = served.pools["one"]
        before_all = one.fill_more(b"one")
        held = Held.of(three)
        assert held.read(held.handle) == b"one"
        served.server.stop()
        one.make_anew(b"new")
        after_all = one.fill_more(b"new")
        node = min(before_all.keys() & after_all.keys())
        (_, before), (path, after) = before_all[node], after_all[node]
        path.rename(one.mount.path / "K")
        served.server.start()
        with refused(ESTALE):
            held.read(held.handle)
        for version in (3, 4):
            with served.client(version, "one") as new:
                assert new.call("read_file", "/K") == b"new"
        with refused(ESTALE):
            held.read(held.handle)
    with served.client(3, "one") as three:
        fresh = Held.of(three)
        assert fresh.handle.count(after.raw) == 1
        with refused(ESTALE):
            fresh.read(fresh.handle.replace(after.raw, before.raw))
        assert fresh.read(fresh.handle) == b"new"
