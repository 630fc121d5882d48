"""A directory at the top of the mount that is a tenant: what lies below it is its own."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fuse.conftest import NOBODY
from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.kernel.calls import refused
from tests.support.mounts.bounded_pool import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    CREATE,
    MANY,
    bounded_pool,
    store_whole,
)
from tests.support.mounts.mounting import Mounted
from tests.support.mounts.supervised import Supervised

pytestmark = [pytest.mark.needs_fuse, pytest.mark.usefixtures("kvfs_only")]

#: Blocks that the one with a quota may store.
QUOTA: Final = 16
TENANT: Final = "user.kvfs.tenant"
SETTINGS: Final = f'[tenants."/bound"]\nquota = "{QUOTA}M"\n'


@pytest.fixture(params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mounted]:
    """A pool of 96 MiB with three directories for everybody: /bound has a quota by the settings."""
    settings = tmp_path / "kv.toml"
    settings.write_text(SETTINGS)
    with bounded_pool(request.param, "--config", str(settings), kind=Supervised) as mounted:
        for name in ("bound", "other", "free"):
            (mounted.path / name).mkdir()
            (mounted.path / name).chmod(0o777)
        yield mounted


@pytest.fixture
def user() -> Iterator[Caller]:
    with Caller(NOBODY, NOBODY) as caller:
        yield caller


def stored(pool: Mounted) -> dict[str, float]:
    """Return how many blocks each tenant stores that stores some, by its name in the status."""
    tenants: dict[str, dict[str, Any]] = pool.status()["tenants"]
    held = {name: row["stored_bytes"] / BLOCK_BYTES for name, row in tenants.items()}
    return {name: blocks for name, blocks in held.items() if blocks}


def test_what_one_user_stores_counts_for_the_directories(pool: Mounted, user: Caller) -> None:
    """[tenants] However deep it lies; what lies below no tenant is its owner's."""
    os.setxattr(pool.path / "other", TENANT, b"1")
    (pool.path / "other/deep").mkdir(mode=0o777)
    (pool.path / "other/deep").chmod(0o777)
    for number, name in enumerate(("bound", "other", "other/deep", "free", "other/deep")):
        store_whole(user, pool.path / name / str(number))
    assert stored(pool) == {"/bound": 1, "/other": 3, str(NOBODY): 1}
    assert pool.status()["tenants"]["/bound"]["quota_bytes"] == QUOTA * BLOCK_BYTES


def test_a_quota_of_a_directory_takes_its_own_coldest_blocks(pool: Mounted, user: Caller) -> None:
    """[quota] The pool is not full, and what the same user has elsewhere stays."""
    for number in range(8):
        store_whole(user, pool.path / f"free/{number}")
    for number in range(2 * QUOTA):
        store_whole(user, pool.path / f"bound/{number}")
    until(lambda: stored(pool)["/bound"] <= QUOTA, "its oldest go")
    there = [(pool.path / f"bound/{number}").exists() for number in range(2 * QUOTA)]
    assert there == [False] * QUOTA + [True] * QUOTA
    assert len(list((pool.path / "free").iterdir())) == 8
    seen = os.statvfs(pool.path / "bound"), os.statvfs(pool.path / "free")
    sizes_bytes = [each.f_blocks * each.f_frsize for each in seen]
    assert sizes_bytes == [QUOTA * BLOCK_BYTES, CAPACITY_BYTES]
    assert os.statvfs(pool.path / f"bound/{QUOTA}").f_blocks == seen[0].f_blocks


def test_drafts_as_large_as_its_quota_are_refused_one_more_even_of_root(pool: Mounted) -> None:
    """[quota] In containers all are root: the directory holds them, not the user."""
    held: list[int] = []
    with refused(errno.EDQUOT):
        for number in range(2 * QUOTA):
            held.append(os.open(pool.path / f"bound/{number}.tmp", CREATE, 0o644))
            os.write(held[-1], bytes(BLOCK_BYTES))
    assert QUOTA <= len(held) <= QUOTA + 1
    for fd in held:
        os.close(fd)


def test_a_flood_in_one_directory_leaves_another_its_share(pool: Mounted, user: Caller) -> None:
    """[tenants] Both are filled by one user: the blocks of /other are half of the pool."""
    for name in ("other", "free"):
        os.setxattr(pool.path / name, TENANT, b"1")
    wanted = CAPACITY_BYTES // BLOCK_BYTES // 4
    for number in range(wanted):
        store_whole(user, pool.path / f"other/{number}")
    for number in range(MANY):
        store_whole(user, pool.path / f"free/{number}")
    assert len(list((pool.path / "other").iterdir())) == wanted


def test_a_rename_moves_blocks_to_another_account(pool: Mounted, user: Caller) -> None:
    """[tenants] One by one, and with a directory that has them."""
    os.setxattr(pool.path / "other", TENANT, b"1")
    (pool.path / "other/deep").mkdir()
    (pool.path / "other/deep").chmod(0o777)
    for number in range(3):
        store_whole(user, pool.path / f"other/deep/{number}")
    assert stored(pool) == {"/other": 3}
    user.os("rename", str(pool.path / "other/deep/0"), str(pool.path / "bound/0"))
    assert stored(pool) == {"/other": 2, "/bound": 1}
    (pool.path / "other/deep").rename(pool.path / "bound/deep")
    until(lambda: stored(pool) == {"/bound": 3}, "what came with its directory is counted")
    (pool.path / "bound").rename(pool.path / "unknown-to-the-settings")
    until(lambda: stored(pool) == {str(NOBODY): 3}, "the settings name the path")
    (pool.path / "unknown-to-the-settings/deep").rename(pool.path / "other/deep")
    until(lambda: stored(pool) == {"/other": 2, str(NOBODY): 1}, "as before")
    (pool.path / "other").rename(pool.path / "named-anew")
    assert stored(pool) == {"/named-anew": 2, str(NOBODY): 1}
    os.removexattr(pool.path / "named-anew", TENANT)
    until(lambda: stored(pool) == {str(NOBODY): 3}, "it is no tenant any more")


def test_it_outlives_its_server_and_a_mount(pool: Mounted, user: Caller) -> None:
    """[tenants] With what attributes say it may store."""
    for name, value in ((TENANT, b"1"), ("user.kvfs.quota", b"8M"), ("user.kvfs.weight", b"2")):
        os.setxattr(pool.path / "other", name, value)
    for name in ("bound", "other", "free"):
        store_whole(user, pool.path / name / "block")
    before = stored(pool)
    assert before == {"/bound": 1, "/other": 1, str(NOBODY): 1}
    pool.kill_server()
    pool.follow_server()
    until(lambda: stored(pool) == before, "the next server knows them")
    pool.stop()
    pool.start()
    until(lambda: stored(pool) == before, "the next mount knows them")
    told = pool.status()["tenants"]["/other"]
    assert (told["quota_bytes"], told["weight"]) == (8 * BLOCK_BYTES, 2.0)
    (pool.path / "other/block").unlink()
    (pool.path / "other").rmdir()
    assert "/other" not in pool.status()["tenants"]


def test_only_root_says_so_and_only_at_the_top(pool: Mounted, user: Caller) -> None:
    (pool.path / "free/deep").mkdir()
    with pytest.raises(PermissionError):
        user.os("setxattr", str(pool.path / "free"), TENANT, b"1")
    for path in ("free/deep", ""):
        with refused(errno.EINVAL):
            os.setxattr(pool.path / path, TENANT, b"1")
        with refused(errno.EINVAL):
            os.setxattr(pool.path / path, "user.kvfs.quota", b"1G")
    for name, value in ((TENANT, b"yes"), ("user.kvfs.quota", b"much")):
        with refused(errno.EINVAL):
            os.setxattr(pool.path / "free", name, value)
    os.setxattr(pool.path / "bound", TENANT, b"0")  # it goes over the settings
    assert "/bound" not in pool.status()["tenants"]
    assert TENANT not in os.listxattr(pool.path / "bound")
    os.removexattr(pool.path / "bound", TENANT)
    assert "/bound" in pool.status()["tenants"]
