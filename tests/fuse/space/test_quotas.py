"""A user with a quota: what it stores above it takes its own blocks, and nobody else's."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fuse.conftest import NOBODY, OTHER
from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.kernel.calls import refused
from tests.support.mounts.bounded_pool import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    CREATE,
    bounded_pool,
    store_whole,
)
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]

#: Blocks of the one with a quota.
QUOTA: Final = 16
BOUND, FREE = NOBODY, OTHER


@pytest.fixture(params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mounted]:
    """A pool of 96 MiB, in which one user has a quota."""
    settings = tmp_path / "kv.toml"
    settings.write_text(f'[tenants.{BOUND}]\nquota = "{QUOTA}M"\n[tenants.{FREE}]\nweight = 3\n')
    with bounded_pool(request.param, "--config", str(settings)) as mounted:
        yield mounted


@pytest.fixture
def bound() -> Iterator[Caller]:
    with Caller(BOUND, BOUND) as caller:
        yield caller


@pytest.fixture
def free() -> Iterator[Caller]:
    with Caller(FREE, FREE) as caller:
        yield caller


def told(pool: Mounted, uid: int = BOUND) -> dict[str, Any]:
    account: dict[str, Any] = pool.status()["tenants"][str(uid)]
    return account


def seen(pool: Mounted, name: str, blocks: int) -> list[bool]:
    return [(pool.path / f"{name}{number}").exists() for number in range(blocks)]


def test_stores_over_a_quota_take_its_owners_coldest_ahead_of_need(
    pool: Mounted, bound: Caller, free: Caller
) -> None:
    """[quota] The pool is half empty; nobody is refused."""
    for number in range(8):
        store_whole(free, pool.path / f"other{number}")
    for number in range(2 * QUOTA):
        store_whole(bound, pool.path / f"own{number}")
    until(lambda: told(pool)["stored_bytes"] <= QUOTA * BLOCK_BYTES, "its oldest go")
    assert seen(pool, "own", 2 * QUOTA) == [False] * QUOTA + [True] * QUOTA
    assert all(seen(pool, "other", 8))
    assert pool.status()["cache"]["evicted"]["quota"]["blocks"] == QUOTA
    assert told(pool)["quota_bytes"] == told(pool)["share_bytes"] == QUOTA * BLOCK_BYTES
    assert told(pool, FREE)["weight"] == 3
    assert told(pool, FREE)["quota_bytes"] is None


def test_drafts_as_large_as_a_quota_are_refused_one_more(
    pool: Mounted, bound: Caller, free: Caller
) -> None:
    """[quota] What may not go has a hard bound, for its owner alone."""
    held: list[int] = []
    with refused(errno.EDQUOT):
        for number in range(2 * QUOTA):
            fd = bound.os("open", str(pool.path / f"draft{number}.tmp"), CREATE, 0o644)
            held.append(fd)
            bound.os("write", fd, bytes(BLOCK_BYTES))
    assert QUOTA <= len(held) <= QUOTA + 1
    for number in range(2 * QUOTA):
        store_whole(free, pool.path / f"other{number}")
    for number, fd in enumerate(held):
        # Closed and not renamed they would be leased to their maker, which lives on.
        bound.os("unlink", str(pool.path / f"draft{number}.tmp"))
        bound.os("close", fd)
    until(lambda: stores(bound, pool.path / "again"), "its quota is free")


def stores(caller: Caller, path: Path) -> bool:
    try:
        store_whole(caller, path)
    except OSError:
        return False
    return True


def test_df_shows_a_quota_to_who_has_it(pool: Mounted, bound: Caller, free: Caller) -> None:
    """[statfs] [quota] What it stores may go for what it stores next, so it counts as free."""
    for number in range(4):
        store_whole(bound, pool.path / f"own{number}")

    def shown(who: Caller) -> tuple[int, int]:
        seen = who.os("statvfs", str(pool.path))
        return seen.f_blocks, seen.f_bavail

    quota = QUOTA * BLOCK_BYTES // 4096
    until(lambda: shown(bound) == (quota, quota), "no draft of its counts any more")
    assert shown(free)[0] == CAPACITY_BYTES // 4096


def test_who_only_reads_as_much_as_its_quota_may_store(
    pool: Mounted, bound: Caller, free: Caller
) -> None:
    """[quota] Others' blocks that it has open take nothing of it."""
    for number in range(QUOTA + 2):
        store_whole(free, pool.path / f"other{number}")
        bound.os("open", str(pool.path / f"other{number}"), os.O_RDONLY)
    store_whole(bound, pool.path / "own")
    assert seen(pool, "own", 0) == []
    assert (pool.path / "own").exists()


def test_a_user_that_is_not_there_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    settings = tmp_path / "kv.toml"
    settings.write_text("[tenants.nobody-here]\nweight = 2\n")
    (tmp_path / "pool").mkdir()
    (tmp_path / "kv").mkdir()
    arguments = ("mount", str(tmp_path / "pool"), str(tmp_path / "kv"), "--config", str(settings))
    done = run_kvfs(*arguments, check=False)
    assert done.returncode == 2
    assert "'nobody-here' is no user of /etc/passwd" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list((tmp_path / "pool").iterdir()) == []
