"""One user stores as much as the pool holds, and more; what others have of their share stays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller
from tests.support.mounts.bounded_pool import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    HONEST,
    HOSTILE,
    bounded_pool,
    store_whole,
)
from tests.support.mounts.mounting import Mounted

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]

FITS: Final = CAPACITY_BYTES // BLOCK_BYTES
#: What is kept free ahead of writers at most, and has an extent that is ready.
AHEAD: Final = 12
#: Half of what the pool holds for blocks.
SHARE: Final = (FITS - AHEAD) // 2 - 1


@pytest.fixture(params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A pool that everybody may store in."""
    with bounded_pool(request.param) as mounted:
        yield mounted


def seen(directory: Path, name: str, blocks: int) -> int:
    """Return how many blocks of that name are there."""
    return sum((directory / f"{name}{number}").exists() for number in range(blocks))


def test_a_flood_of_the_whole_pool_leaves_the_other_its_share(
    pool: Mounted, hostile: Caller, honest: Caller
) -> None:
    """[fair-eviction] Nobody's store is refused, and both go on."""
    for number in range(FITS):
        store_whole(honest, pool.path / f"own{number}")
    for number in range(2 * FITS):
        store_whole(hostile, pool.path / f"flood{number}")
    assert SHARE <= seen(pool.path, "own", FITS) <= FITS // 2
    for number in range(FITS):
        store_whole(hostile, pool.path / f"flood{number}.again")
        store_whole(honest, pool.path / f"more{number}")
    assert seen(pool.path, "more", FITS) >= SHARE
    told = pool.status()["tenants"]
    assert told[str(HONEST)]["stored_bytes"] >= SHARE * BLOCK_BYTES
    assert told[str(HOSTILE)]["stored_bytes"] >= SHARE * BLOCK_BYTES


def test_one_alone_has_everything(pool: Mounted, hostile: Caller) -> None:
    """[fair-eviction] As if there were no shares."""
    for number in range(2 * FITS):
        store_whole(hostile, pool.path / f"flood{number}")
    assert seen(pool.path, "flood", 2 * FITS) >= FITS - AHEAD
