"""The ends of each of three that serve a block over NFS: the kvfs daemon, Ganesha, a client.

Whatever dies in the middle of a store, a name is whole for all, or it is not there. What a restart
keeps, and which error a client gets until then, is in docs/nfs.md.
"""

import contextlib
import errno
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import seed_of, stamped
from tests.support.clients.stepping import until
from tests.support.kernel.calls import refused, tolerated
from tests.support.nfs.client import NfsClient
from tests.support.nfs.pool import NfsPool, nfs_pool

pytestmark = pytest.mark.needs_fuse

#: libnfs writes NFSv4 in small parts, so that such a block takes as long.
BLOCK_BYTES: Final = {3: 4 << 20, 4: 128 << 10}
#: What a client gets from a server whose mount is dead, or whose connection broke.
DEAD: Final = (errno.EIO, errno.ESTALE, errno.EFAULT)
KILLS: Final = [3, pytest.param(60, marks=pytest.mark.proof)]


@pytest.fixture(
    scope="module", params=["passthrough", pytest.param("daemon", marks=pytest.mark.proof)]
)
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NfsPool]:
    """A pool on each data path, behind a server with its default settings."""
    logs = tmp_path_factory.mktemp("logs")
    with nfs_pool(logs, "--capacity=500MiB", f"--data-path={request.param}") as made:
        if request.param == "passthrough":
            require_passthrough(made.mounted)
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses: the server knows for a minute what was under one."""
    return str(request.node.originalname)


def looked_at(pool: NfsPool, client: NfsClient, name: str, size_bytes: int) -> bool:
    """Whether *name* is there, and then whole, for a client and for a local process."""
    wholes = []
    for read in (
        lambda: client.call("read_file", f"/{name}"),
        lambda: (pool.path / name).read_bytes(),
    ):
        try:
            seed_of(read(), name, size_bytes)
            wholes.append(True)
        except FileNotFoundError:
            wholes.append(False)
    assert wholes in ([True, True], [False, False]), f"{name}: {wholes}"
    return wholes[0]


def wait_for_bytes(path: Path, size_bytes: int) -> None:
    """Wait until so much of the temporary file for *path* is written, or all of it is renamed."""
    temporary = path.with_name(f"{path.name}.tmp")

    def written() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return temporary.stat().st_size >= size_bytes
        return path.exists()

    until(written, f"{size_bytes} bytes of {path.name}", pause_s=0.0005)


def restart_mount(pool: NfsPool) -> None:
    """Mount again what was killed, with the server stopped around it."""
    pool.server.stop()
    pool.mounted.start()
    pool.server.start()


def end(who: str, pool: NfsPool, client: NfsClient) -> None:
    """SIGKILL one of the three, and put another in its place."""
    if who == "client":
        client.kill()
    elif who == "server":
        pool.server.kill()
        pool.server.start()
    else:
        pool.mounted.kill_daemon()
        restart_mount(pool)


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("version", [3, 4], ids=["v3", "v4"])
@pytest.mark.parametrize("who", ["client", "server", "daemon"])
def test_a_store_that_somebody_leaves_in_the_middle(
    pool: NfsPool, who: str, version: int, kills: int
) -> None:
    """The connector renames: its block is whole, or a miss, and the next store of it is whole."""
    chance, size_bytes, found = random.Random(kills), BLOCK_BYTES[version], Counter[str]()
    for number in range(kills):
        name = f"{who}-{version}-{kills}-{number}"
        data = stamped(name, size_bytes)
        with pool.client(version) as client:
            client.begin("store", f"/{name}", data)
            wait_for_bytes(pool.path / name, chance.randrange(1, size_bytes))
            end(who, pool, client)
            with contextlib.suppress(OSError, EOFError):
                client.answer()
        with pool.client(version) as other:
            found["whole" if looked_at(pool, other, name, size_bytes) else "missing"] += 1
            other.call("store", f"/{name}", data)
            assert looked_at(pool, other, name, size_bytes)
    print(json.dumps({"who": who, "version": version, "kills": kills, **found}))
    assert found["missing"] >= kills // 3, "hardly one was in the middle"


def test_a_clean_restart_with_the_server_stopped(pool: NfsPool, name: str) -> None:
    """A client of v3 goes on with what it has open; of v4 another one does, for libnfs's sake.

    With another device number, which somebody else took meanwhile, ESTALE tells it to mount anew.
    """
    data = stamped(name, BLOCK_BYTES[3])
    with pool.client(3, retries=-1) as client:
        client.call("store", f"/{name}", data)
        file = client.call("open", f"/{name}")
        device = pool.path.stat().st_dev
        pool.server.stop()
        pool.mounted.remount()
        pool.server.start()
        if pool.path.stat().st_dev == device:
            assert client.call("pread", file, len(data), 0) == data
            client.call("store", f"/{name}-next", data)
        else:
            with refused(errno.ESTALE):
                client.call("pread", file, len(data), 0)
    for version in (3, 4):
        with pool.client(version) as client:
            assert client.call("read_file", f"/{name}") == data
            client.call("store", f"/{name}-{version}", data[: BLOCK_BYTES[4]])
            assert (pool.path / f"{name}-{version}").read_bytes() == data[: BLOCK_BYTES[4]]


def test_a_dead_daemon_is_an_error_at_once(pool: NfsPool, name: str) -> None:
    """Nothing hangs, and a new mount helps when the server was stopped around it."""
    data = stamped(name, BLOCK_BYTES[4])
    (pool.path / name).write_bytes(data)
    with pool.client(3) as three, pool.client(4) as four:
        pool.mounted.kill_daemon()
        for client in (three, four):
            with tolerated(*DEAD):  # the server may know both by heart
                assert client.call("read_file", f"/{name}") == data
            with tolerated(*DEAD):
                assert name in client.call("listdir", "/")
            with refused(*DEAD):
                client.call("store", f"/{name}-next", data)
    restart_mount(pool)
    for version in (3, 4):
        with pool.client(version) as client:
            assert name in client.call("listdir", "/")
            assert client.call("read_file", f"/{name}") == data


def test_a_killed_server_keeps_what_was_renamed(pool: NfsPool, name: str) -> None:
    data = stamped(name, BLOCK_BYTES[3])
    with pool.client(3, retries=-1) as client:
        client.call("store", f"/{name}", data)
        file = client.call("open", f"/{name}")
        pool.server.kill()
        pool.server.start()
        assert client.call("pread", file, len(data), 0) == data
        client.call("store", f"/{name}-next", data)
    with pool.client(4) as client:
        assert client.call("read_file", f"/{name}") == data
        assert {name, f"{name}-next"} <= set(client.call("listdir", "/"))


def test_a_killed_daemon_keeps_what_was_renamed(pool: NfsPool, name: str) -> None:
    """Although the server had it open."""
    blocks = {version: stamped(name, BLOCK_BYTES[version]) for version in (3, 4)}
    for version, data in blocks.items():
        with pool.client(version) as client:
            client.call("store", f"/{name}-{version}", data)
    pool.mounted.kill_daemon()
    restart_mount(pool)
    for version, data in blocks.items():
        with pool.client(version) as client:
            assert client.call("read_file", f"/{name}-{version}") == data
