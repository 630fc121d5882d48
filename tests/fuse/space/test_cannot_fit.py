"""A request that cannot fit is refused before anything goes for it, whoever asks and however."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import EvictedTooLittle
from tests.fuse.conftest import NOBODY
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import fallocate, refused, write_file
from tests.support.mounts.bounded_pool import CAPACITY_BYTES, CREATE, bounded_pool
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = pytest.mark.needs_fuse

MIB: Final = 1 << 20
LARGE, SMALL = 60, 600


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A pool of 96 MiB on each data path, nearly full of blocks that may all go."""
    with bounded_pool(request.param) as mounted:
        (mounted.path / "large").mkdir()
        (mounted.path / "small").mkdir()
        for number in range(LARGE):
            store(mounted.path / "large" / f"{number}", MIB)
        for number in range(SMALL):
            store(mounted.path / "small" / f"{number}", 4096)
        yield mounted


def store(path: Path, size_bytes: int) -> None:
    """Store a block as connectors do."""
    draft = path.with_suffix(".tmp")
    write_file(draft, os.urandom(size_bytes))
    draft.rename(path)


@contextlib.contextmanager
def nothing_goes(mounted: Mounted) -> Iterator[None]:
    """Expect that no block is evicted, and that no name goes."""
    before = mounted.status()["eviction"]["blocks"]
    yield
    assert mounted.status()["eviction"]["blocks"] == before
    assert len(os.listdir(mounted.path / "large")) == LARGE
    assert len(os.listdir(mounted.path / "small")) == SMALL


@pytest.mark.parametrize("size_bytes", [1 << 50, 10 * CAPACITY_BYTES, CAPACITY_BYTES + MIB])
def test_fallocate_of_more_than_there_is(pool: Mounted, size_bytes: int) -> None:
    with nothing_goes(pool), Caller(NOBODY, NOBODY) as caller:
        fd = caller.os("open", str(pool.path / "slab"), CREATE, 0o600)
        with refused(errno.ENOSPC):
            caller.os("posix_fallocate", fd, 0, size_bytes)
        caller.os("close", fd)
        caller.os("unlink", str(pool.path / "slab"))


def test_fallocate_of_what_others_keep(pool: Mounted) -> None:
    """Half of the pool is a slab: no request for the half and a little more can fit."""
    slab = os.open(pool.path / "slab", CREATE)
    try:
        os.posix_fallocate(slab, 0, 24 * MIB)
        with nothing_goes(pool):
            more = os.open(pool.path / "more", CREATE)
            for mode in (0, 1):
                with refused(errno.ENOSPC):
                    fallocate(more, mode, 0, CAPACITY_BYTES - 23 * MIB)
            os.close(more)
            os.unlink(pool.path / "more")
    finally:
        os.close(slab)
        os.unlink(pool.path / "slab")


def test_fallocate_of_what_is_being_read(pool: Mounted) -> None:
    """Their space would come back after the last reader, who need not end."""
    readers = [os.open(pool.path / "large" / f"{number}", os.O_RDONLY) for number in range(LARGE)]
    try:
        with nothing_goes(pool):
            fd = os.open(pool.path / "slab", CREATE)
            with refused(errno.ENOSPC):
                os.posix_fallocate(fd, 0, CAPACITY_BYTES // 2)
            os.close(fd)
            os.unlink(pool.path / "slab")
    finally:
        for reader in readers:
            os.close(reader)


def test_sparse_files_of_any_size(pool: Mounted) -> None:
    """They hold nothing, so nothing goes but what may be kept free ahead of their writer."""
    with nothing_goes(pool):
        for size_bytes in (1 << 50, 10 * CAPACITY_BYTES):
            fd = os.open(pool.path / "sparse", CREATE)
            os.ftruncate(fd, size_bytes)
            os.pwrite(fd, b"end", size_bytes - 3)
            os.close(fd)
            os.unlink(pool.path / "sparse")


def test_evict_bytes_of_more_than_may_go(pool: Mounted) -> None:
    """The answer says how much may go, as with --dry-run, and the blocks stay."""
    for where in (pool.path, pool.path / "large"):
        with nothing_goes(pool):
            done = run_kvfs("evict", str(where), "--bytes", "1T", "--json", check=False)
        assert done.returncode == EvictedTooLittle.exit_code
        answer = json.loads(done.stdout)
        assert (answer["blocks"], answer["bytes"]) == (0, 0)
        assert answer["found_bytes"] >= LARGE * MIB
        (line,) = done.stderr.splitlines()
        assert "nothing evicted: of 1 TiB only" in line


def test_what_can_fit_has_its_space(pool: Mounted) -> None:
    """And takes no more than that."""
    before = pool.status()["eviction"]["bytes"]
    fd = os.open(pool.path / "slab", CREATE)
    os.posix_fallocate(fd, 0, CAPACITY_BYTES // 2)
    assert os.fstat(fd).st_blocks * 512 >= CAPACITY_BYTES // 2
    os.close(fd)
    assert 0 < pool.status()["eviction"]["bytes"] - before < CAPACITY_BYTES // 2
