"""What a client of NFS-Ganesha sees of a pool: right bytes, or the error that is documented.

Each test on NFSv3 and NFSv4, of a pool on each data path.
"""

import errno
import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.kernel.calls import refused, tolerated
from tests.support.mounts.mounting import run_kvfs
from tests.support.nfs.client import NfsClient
from tests.support.nfs.pool import NfsPool, nfs_pool

pytestmark = pytest.mark.needs_fuse

MIB: Final = 1 << 20
#: NFSv4 writes of libnfs are small, so its blocks are.
BLOCK_BYTES: Final = {3: MIB, 4: 32 << 10}


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NfsPool]:
    """A pool of 200 MiB on each data path, behind a server with its default settings."""
    logs = tmp_path_factory.mktemp("logs")
    with nfs_pool(logs, "--capacity=200MiB", f"--data-path={request.param}") as made:
        if request.param == "passthrough":
            require_passthrough(made.mounted)
        yield made


@pytest.fixture(params=[3, 4], ids=["v3", "v4"])
def version(request: pytest.FixtureRequest) -> int:
    found = request.param
    assert isinstance(found, int)
    return found


@pytest.fixture
def client(pool: NfsPool, version: int) -> Iterator[NfsClient]:
    """One of its own: libnfs does not renew a lease of NFSv4, which ends after 60 s."""
    with pool.client(version) as made:
        yield made


@pytest.fixture
def block(version: int) -> bytes:
    return os.urandom(BLOCK_BYTES[version])


@pytest.fixture
def name(request: pytest.FixtureRequest, version: int) -> str:
    """A name that no other test uses."""
    return f"{request.node.originalname}-{version}"


def test_a_store_is_read_back_by_all(
    pool: NfsPool, client: NfsClient, version: int, name: str, block: bytes
) -> None:
    client.call("store", f"/{name}", block)
    assert client.call("read_file", f"/{name}") == block
    assert (pool.path / name).read_bytes() == block
    with pool.client(version) as other:
        assert other.call("read_file", f"/{name}") == block
        with refused(errno.ENOENT):
            other.call("stat", f"/{name}.tmp")


def test_what_a_local_process_stored_is_read(
    pool: NfsPool, client: NfsClient, name: str, block: bytes
) -> None:
    with refused(errno.ENOENT):
        client.call("stat", f"/{name}")
    (pool.path / f"{name}.tmp").write_bytes(block)
    os.rename(pool.path / f"{name}.tmp", pool.path / name)
    assert client.call("read_file", f"/{name}") == block


def test_a_rename_over_a_name_replaces_it(
    pool: NfsPool, client: NfsClient, name: str, block: bytes
) -> None:
    """A reader that has the old one open gets its bytes, or ESTALE."""
    client.call("store", f"/{name}", block)
    reader = client.call("open", f"/{name}")
    later = bytes(reversed(block))
    client.call("store", f"/{name}", later)
    assert client.call("read_file", f"/{name}") == later
    assert (pool.path / name).read_bytes() == later
    with tolerated(errno.ESTALE):
        assert client.call("pread", reader, len(block), 0) == block
    client.call("close", reader)


def test_a_name_that_is_removed_is_gone_for_all(
    pool: NfsPool, client: NfsClient, name: str, block: bytes
) -> None:
    client.call("store", f"/{name}", block)
    client.call("unlink", f"/{name}")
    with refused(errno.ENOENT):
        client.call("stat", f"/{name}")
    assert not (pool.path / name).exists()
    with refused(errno.ENOENT):
        client.call("unlink", f"/{name}")


def test_directories(pool: NfsPool, client: NfsClient, name: str, block: bytes) -> None:
    client.call("mkdir", f"/{name}")
    client.call("store", f"/{name}/one", block)
    with refused(errno.ENOTEMPTY, errno.EEXIST):
        client.call("rmdir", f"/{name}")
    client.call("rename", f"/{name}/one", f"/{name}-two")
    client.call("rmdir", f"/{name}")
    assert not (pool.path / name).exists()
    assert (pool.path / f"{name}-two").read_bytes() == block


def test_a_truncated_block_is_as_long_for_all(
    pool: NfsPool, client: NfsClient, name: str, block: bytes
) -> None:
    client.call("store", f"/{name}", block)
    half = block[: len(block) // 2]
    client.call("truncate", f"/{name}", len(half))
    assert client.call("read_file", f"/{name}") == half
    assert (pool.path / name).read_bytes() == half
    client.call("truncate", f"/{name}", 0)
    assert client.call("read_file", f"/{name}") == b""


def test_a_rewrite_under_a_reader(
    pool: NfsPool, client: NfsClient, name: str, block: bytes
) -> None:
    """Who has it open reads the new bytes: the server empties in place."""
    client.call("store", f"/{name}", block)
    with (pool.path / name).open("rb", buffering=0) as reader:
        client.call("write_file", f"/{name}", block[::-1])
        assert reader.read(len(block)) == block[::-1]
    assert client.call("read_file", f"/{name}") == block[::-1]


def test_of_two_that_create_one_name_one_does(
    pool: NfsPool, version: int, name: str, block: bytes
) -> None:
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with pool.client(version) as one, pool.client(version) as other:
        for number in range(3):
            for client in (one, other):
                client.begin("open", f"/{name}-{number}", exclusive)
            files = []
            for client in (one, other):
                with tolerated(errno.EEXIST):
                    files.append((client, client.answer()))
            assert len(files) == 1
            client, file = files[0]
            client.call("pwrite", file, block, 0)
            client.call("close", file)
            assert client.call("read_file", f"/{name}-{number}") == block


def test_of_two_that_store_one_name_one_is_whole(
    pool: NfsPool, version: int, name: str, block: bytes
) -> None:
    """With temporary names of their own."""
    with pool.client(version) as one, pool.client(version) as other:
        for _ in range(3):
            one.begin("store", f"/{name}", block, "one")
            other.begin("store", f"/{name}", block[::-1], "other")
            one.answer()
            other.answer()
            found = one.call("read_file", f"/{name}")
            assert found in (block, block[::-1])
            assert other.call("read_file", f"/{name}") == found
            assert (pool.path / name).read_bytes() == found


def test_an_eviction_during_a_read(
    pool: NfsPool, client: NfsClient, version: int, name: str, block: bytes
) -> None:
    """Who has it open reads its bytes, or ESTALE; its name is a miss here at once."""
    client.call("store", f"/{name}", block)
    with pool.client(version) as other:
        reader = other.call("open", f"/{name}")
        half = len(block) // 2
        assert other.call("pread", reader, half, 0) == block[:half]
        run_kvfs("evict", str(pool.path / name))
        assert not (pool.path / name).exists()
        with tolerated(errno.ESTALE):
            assert other.call("pread", reader, half, half) == block[half:]
        with tolerated(errno.ESTALE):
            assert other.call("pread", reader, half, 0) == block[:half]
    client.call("store", f"/{name}", block[::-1])
    assert (pool.path / name).read_bytes() == block[::-1]
    assert client.call("read_file", f"/{name}") == block[::-1]


@pytest.mark.parametrize(
    "count", [500, pytest.param(100_000, marks=pytest.mark.proof)], ids=["ci", "whole"]
)
def test_all_names_are_listed(pool: NfsPool, client: NfsClient, name: str, count: int) -> None:
    directory = pool.path / f"{name}-{count}"
    directory.mkdir()
    wanted = {f"{number:06}" for number in range(count)}
    for file in wanted:
        os.mknod(directory / file)
    found = client.call("listdir", f"/{directory.name}")
    assert len(found) == count
    assert set(found) == wanted
