"""Who pins an empty directory and fills it: the bound holds as it fills, and others store on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.conftest import NOBODY
from tests.support.clients.callers import Caller
from tests.support.mounts.bounded_pool import BLOCK_BYTES as MIB
from tests.support.mounts.bounded_pool import CAPACITY_BYTES, MANY, bounded_pool, store_whole
from tests.support.mounts.mounting import CommandFailed, Mounted, run_kvfs

pytestmark = pytest.mark.needs_fuse


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with bounded_pool(request.param) as mounted:
        yield mounted


@pytest.fixture
def user() -> Iterator[Caller]:
    with Caller(NOBODY, NOBODY) as caller:
        yield caller


@pytest.fixture
def directory(pool: Mounted, user: Caller) -> Iterator[Path]:
    """The user's own, empty; nothing of it is left after the test."""
    made = pool.path / "mine"
    user.os("mkdir", str(made), 0o755)
    yield made
    run_kvfs("unpin", "--all", str(pool.path))
    for path in [*made.iterdir(), *pool.path.iterdir()]:
        if path != made:
            path.unlink(missing_ok=True)
    made.rmdir()


def store_many(caller: Caller, directory: Path, count: int) -> list[Path]:
    """Store *count* blocks of 1 MiB by temporary names; raises OSError if one is refused."""
    blocks = [directory / f"{caller.uid}-{number:03}" for number in range(count)]
    for final in blocks:
        store_whole(caller, final)
    return blocks


@pytest.mark.parametrize(("name", "value"), [("pin", b"1"), ("evict", b"never")])
def test_what_fills_a_kept_directory_beyond_the_bound_may_go(
    pool: Mounted, user: Caller, directory: Path, name: str, value: bytes
) -> None:
    """[capacity]: half of the pool may be kept; who came first stays."""
    user.os("setxattr", str(directory), f"user.kvfs.{name}", value)
    blocks = store_many(user, directory, MANY)
    with Caller() as other:
        store_many(other, pool.path, MANY)
    there = [path.exists() for path in blocks]
    kept = CAPACITY_BYTES // 2 // MIB
    assert there[:kept] == [True] * kept
    assert not any(there[kept:])
    status = pool.status()
    assert status["pinned_bytes"] == CAPACITY_BYTES // 2
    assert status["evictable_bytes"] > 0.3 * CAPACITY_BYTES


def test_a_pin_beyond_what_others_filled_is_refused_and_says_so(
    pool: Mounted, user: Caller, directory: Path
) -> None:
    user.os("setxattr", str(directory), "user.kvfs.pin", b"1")
    store_many(user, directory, MANY // 2)
    with Caller() as other:
        (block,) = store_many(other, pool.path, 1)
    with pytest.raises(CommandFailed, match="limit"):
        run_kvfs("pin", str(block))
    run_kvfs("pin", str(directory))  # it is pinned already


def test_room_among_the_kept_is_taken_by_who_stores_next(
    pool: Mounted, user: Caller, directory: Path
) -> None:
    user.os("setxattr", str(directory), "user.kvfs.pin", b"1")
    first = store_many(user, directory, MANY // 2)
    for path in first:
        if path.exists():
            user.os("unlink", str(path))
    again = store_many(user, directory, 10)
    with Caller() as other:
        store_many(other, pool.path, MANY)
    assert all(path.exists() for path in again)
