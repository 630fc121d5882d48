"""Old versions of blocks, kept by who reads them while O_TRUNC rewrites the name, have a bound."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuse.conftest import NOBODY, OTHER
from tests.support.clients.callers import Caller
from tests.support.kernel.calls import refused
from tests.support.mounts.bounded_pool import BLOCK_BYTES, CAPACITY_BYTES, bounded_pool, store
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.needs_fuse

#: More than the pool holds.
VERSIONS: Final = 129
REWRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture(params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A pool of 96 MiB that everybody may store in."""
    with bounded_pool(request.param) as mounted:
        yield mounted


def rewrite(caller: Caller, path: Path, version: int) -> bytes:
    """Write a version of a block over the last one; return its bytes."""
    data = b"%8d" % version * (BLOCK_BYTES // 8)
    fd = caller.os("open", str(path), REWRITE, 0o644)
    assert caller.os("write", fd, data) == BLOCK_BYTES
    caller.os("close", fd)
    return data


def keep_versions(caller: Caller, path: Path, count: int) -> list[tuple[int, bytes]]:
    """Rewrite a block *count* times, and keep a descriptor of each version; return those."""
    kept = []
    for version in range(count):
        data = rewrite(caller, path, version)
        kept.append((os.open(path, os.O_RDONLY), data))
        assert os.pread(kept[-1][0], BLOCK_BYTES, 0) == data
    return kept


def close_all(kept: list[tuple[int, bytes]]) -> None:
    """Check that each version is whole, and close it."""
    for fd, data in kept:
        assert os.pread(fd, BLOCK_BYTES, 0) == data
        os.close(fd)
    kept.clear()


def test_old_versions_that_are_read_take_a_part_of_the_pool(pool: Mounted) -> None:
    """[rewrite-bound] Beyond it who rewrites is refused, and nobody else; each version is whole."""
    bound = CAPACITY_BYTES // 4 // BLOCK_BYTES
    with Caller(NOBODY, NOBODY) as writer, Caller(OTHER, OTHER) as other:
        kept = keep_versions(writer, pool.path / "name", bound + 2)
        with refused(errno.ENOSPC):
            rewrite(writer, pool.path / "name", VERSIONS)
        assert (pool.path / "name").read_bytes() == kept[-1][1]
        assert pool.status()["old_version_bytes"] == (bound + 1) * BLOCK_BYTES
        for number in range(20):
            draft = pool.path / f"stored{number}.tmp"
            store(other, draft)
            other.os("rename", str(draft), str(draft.with_suffix("")))
        # What nobody reads is rewritten, and then nobody comes to read its old version.
        rewrite(writer, pool.path / "unread", 0)
        fd = writer.os("open", str(pool.path / "unread"), REWRITE, 0o644)
        assert not (pool.path / "unread").exists()
        writer.os("close", fd)
        # Who holds less than an equal share is not refused.
        kept += keep_versions(other, pool.path / "other", 4)
        close_all(kept)
        close_all(keep_versions(writer, pool.path / "name", 8))
        assert pool.status()["old_version_bytes"] == 0
