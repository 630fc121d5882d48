"""Whole or absent: what a client of a real Ganesha rewrites, beside processes that look for it.

NFS has no O_TRUNC: the server empties by a handle (SETATTR). What can be promised then, and what no
NFS server can, is in docs/nfs.md.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stepping import until
from tests.support.kernel.calls import refused, tolerated
from tests.support.nfs.client import NfsClient
from tests.support.nfs.pool import NfsPool, nfs_pool

pytestmark = pytest.mark.needs_fuse

#: libnfs writes NFSv4 in small parts.
BLOCK_BYTES: Final = {3: 1 << 20, 4: 64 << 10}
VERSIONS: Final = (3, 4)


#: So that tests need not wait for the 5 s and 600 s of the defaults.
SOON: Final = ("--set=file_server_close_s=2", "--set=lease_s=6")


@pytest.fixture(
    scope="module", params=["passthrough", pytest.param("daemon", marks=pytest.mark.proof)]
)
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NfsPool]:
    """A pool on each data path; on one of them the kernel is not told what vanished."""
    logs, path = tmp_path_factory.mktemp("logs"), str(request.param)
    told = f"--set=notifications={str(path == 'passthrough').lower()}"
    with nfs_pool(logs, "--capacity=200MiB", f"--data-path={path}", told, *SOON) as made:
        if request.param == "passthrough":
            require_passthrough(made.mounted)
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return str(request.node.originalname)


def found(path: Path) -> bytes | None:
    """Return what a local process finds, None for a miss; listings and stat agree."""
    try:
        size_bytes = path.stat().st_size
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    assert len(data) == size_bytes
    return data


def assert_absent(path: Path) -> None:
    """Nobody here finds it, in any way."""
    assert found(path) is None
    assert path.name not in os.listdir(path.parent)
    with refused(errno.EACCES):
        os.open(path, os.O_WRONLY | os.O_CREAT)


def assert_comes(path: Path, data: bytes) -> None:
    """Wait until it is there. It is whole whenever it is there."""

    def is_there() -> bool:
        now = found(path)
        assert now in (None, data), f"{path.name} is {len(now or b'')} bytes of {len(data)}"
        return now is not None

    until(is_there, f"{path.name} comes", pause_s=0.002)


def begin_to_rewrite(client: NfsClient, name: str, data: bytes) -> int:
    """Empty *name*, which is stored, and write the first half of *data*; return the open file."""
    file = client.call("open", f"/{name}", os.O_WRONLY | os.O_TRUNC)
    client.call("pwrite", file, data[: len(data) // 2], 0)
    return int(file)


def test_what_a_client_rewrites_is_absent_until_it_is_whole(pool: NfsPool, name: str) -> None:
    """[life-server-empties] On v3 that is when nobody has written for a while: it has no close."""
    for version in VERSIONS:
        path, size_bytes = pool.path / f"{name}-{version}", BLOCK_BYTES[version]
        old, new = os.urandom(size_bytes), os.urandom(size_bytes)
        with pool.client(version) as client:
            client.call("store", f"/{path.name}", old)
            assert found(path) == old
            file = client.call("open", f"/{path.name}", os.O_WRONLY)
            client.call("ftruncate", file, 0)
            assert_absent(path)
            client.call("close", file)
            assert_absent(path)
            file = begin_to_rewrite(client, path.name, new)
            assert_absent(path)
            assert client.call("fstat", file).size_bytes == size_bytes // 2
            client.call("pwrite", file, new[size_bytes // 2 :], size_bytes // 2)
            client.call("close", file)
            assert client.call("read_file", f"/{path.name}") == new
            assert_comes(path, new)


def test_a_rename_shows_it_at_once(pool: NfsPool, name: str) -> None:
    """[life-server-empties] Over a temporary name that an earlier store left behind."""
    for version in VERSIONS:
        path, size_bytes = pool.path / f"{name}-{version}", BLOCK_BYTES[version]
        new = os.urandom(size_bytes)
        with pool.client(version) as client:
            client.call("write_file", f"/{path.name}.tmp", new[: size_bytes // 4])
            client.call("store", f"/{path.name}", new)
            assert found(path) == new
            assert found(path.with_suffix(".tmp")) is None


def test_a_killed_daemon_leaves_nothing_of_it(pool: NfsPool, name: str) -> None:
    """[life-server-empties] Neither the old block, whose bytes are gone, nor a part of the new."""
    paths = {version: pool.path / f"{name}-{version}" for version in VERSIONS}
    with pool.client(3) as three, pool.client(4) as four:
        for version, client in ((3, three), (4, four)):
            data = os.urandom(BLOCK_BYTES[version])
            client.call("store", f"/{paths[version].name}", data)
            begin_to_rewrite(client, paths[version].name, data)
        pool.mounted.kill_daemon()
    pool.server.stop()
    pool.mounted.start()
    pool.server.start()
    for version, path in paths.items():
        assert found(path) is None
        with pool.client(version) as client:
            with refused(errno.ENOENT):
                client.call("stat", f"/{path.name}")
            client.call("store", f"/{path.name}", b"next")
        assert found(path) == b"next"


def test_a_local_process_takes_the_name_over(pool: NfsPool, name: str) -> None:
    """[life-server-empties] With O_TRUNC; what the client writes on is nobody's any more."""
    path, new = pool.path / name, os.urandom(1 << 20)
    with pool.client(3) as client:
        client.call("store", f"/{name}", os.urandom(1 << 20))
        begin_to_rewrite(client, name, os.urandom(1 << 20))
        assert found(path) is None
        path.write_bytes(new)
        assert found(path) == new


def test_who_has_it_open_here_sees_it_happen(pool: NfsPool, name: str) -> None:
    """[life-server-empties] Also what the kernel has of it in its cache."""
    path, old, new = pool.path / name, os.urandom(1 << 20), os.urandom(1 << 20)
    with pool.client(3) as client:
        client.call("store", f"/{name}", old)
        with path.open("rb", buffering=0) as reader:
            assert reader.read() == old
            client.call("truncate", f"/{name}", 0)
            assert os.pread(reader.fileno(), 1, 0) == b""
            assert os.fstat(reader.fileno()).st_size == 0
            assert_absent(path)
            client.call("write_file", f"/{name}", new)
            assert os.pread(reader.fileno(), 1 << 20, 0) == new
        assert_comes(path, new)


def test_where_only_a_rename_publishes(pool: NfsPool, name: str) -> None:
    """[life-publish-rename] What a client does not rename nobody here finds, until it is gone."""
    top = pool.path / name
    top.mkdir()
    os.setxattr(top, "user.kvfs.publish", b"rename")
    data = os.urandom(64 << 10)
    for version in VERSIONS:
        with pool.client(version) as client:
            client.call("store", f"/{name}/renamed-{version}", data)
            client.call("write_file", f"/{name}/closed-{version}", data)
            assert found(top / f"renamed-{version}") == data
            assert_absent(top / f"closed-{version}")

    def all_gone() -> bool:
        """Whether the names are free: what is hidden refuses others."""
        taken = []
        for version in VERSIONS:
            assert found(top / f"closed-{version}") is None
            with tolerated(errno.EACCES):
                os.close(os.open(top / f"closed-{version}", os.O_WRONLY | os.O_CREAT))
                taken.append(version)
                os.unlink(top / f"closed-{version}")
        return len(taken) == len(VERSIONS)

    until(all_gone, "what was not renamed is gone")
    assert sorted(os.listdir(top)) == [f"renamed-{version}" for version in VERSIONS]


# ---- what stays possible on any NFS server ----


def test_two_clients_that_write_one_temporary_name_mix_their_bytes(
    pool: NfsPool, name: str
) -> None:
    """As on any file system. With names of their own they do not (test_nfs_ganesha.py)."""
    half_bytes = 256 << 10
    with pool.client(3) as one, pool.client(3) as other:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = [(client, client.call("open", f"/{name}.tmp", flags)) for client in (one, other)]
        for (client, file), letter in zip(files, (b"1", b"2"), strict=True):
            client.call("pwrite", file, letter * half_bytes, 0)
        one.call("pwrite", files[0][1], b"1" * half_bytes, half_bytes)
        one.call("rename", f"/{name}.tmp", f"/{name}")
        assert found(pool.path / name) == b"2" * half_bytes + b"1" * half_bytes


def test_a_client_that_dies_leaves_a_short_block_if_it_does_not_rename(
    pool: NfsPool, name: str
) -> None:
    """Nobody wrote for a while, and no hole tells that more was to come."""
    path, data = pool.path / name, os.urandom(1 << 20)
    with pool.client(4) as client:
        client.call("store", f"/{name}", data)
        begin_to_rewrite(client, name, data[: 64 << 10])
        assert found(path) is None
        client.kill()
    until(lambda: found(path) is not None, "it counts as closed")
    assert found(path) == data[: 32 << 10]
