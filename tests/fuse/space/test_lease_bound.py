"""Who keeps all that he stores under final names is refused in the end, and nobody else is."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.conftest import NOBODY
from tests.support.clients.callers import Caller, callers
from tests.support.mounts.bounded_pool import BLOCK_BYTES as MIB
from tests.support.mounts.bounded_pool import CAPACITY_BYTES, MANY, bounded_pool, store
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = pytest.mark.needs_fuse


@pytest.fixture(scope="module", params=["daemon", "passthrough"])
def pool(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with bounded_pool(request.param) as mounted:
        yield mounted


@pytest.fixture
def kv(pool: Mounted) -> Iterator[Path]:
    """An empty mount; what is left of a test goes with the processes that made it."""
    yield pool.path
    for path in pool.path.iterdir():
        path.unlink(missing_ok=True)


def store_many(caller: Caller, directory: Path, count: int, suffix: str = "") -> int:
    """Store *count* blocks, under temporary names if *suffix* says so; return how many are refused.

    One a process, so that it tells makers apart.
    """
    refused = 0
    for number in range(count):
        try:
            store(caller, directory / f"{caller.pid}-{number:03}{suffix}")
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            refused += 1
    return refused


def renames_many(caller: Caller, directory: Path, count: int) -> None:
    """Store *count* blocks by temporary names; none may be refused."""
    for number in range(count):
        final = directory / f"{caller.pid}-{number:03}-renamed.data"
        draft = final.with_suffix(".tmp")
        store(caller, draft)
        caller.os("rename", str(draft), str(final))


def test_who_keeps_all_is_refused_and_nobody_else(pool: Mounted, kv: Path) -> None:
    """[life-leased]: leases stay, those of others of the same user are given out on."""
    with callers(3) as (keeper, renamer, other):
        refused = store_many(keeper, kv, MANY)
        kept = sorted(kv.iterdir())
        assert refused == MANY - len(kept)
        assert 0.9 * CAPACITY_BYTES < len(kept) * MIB < 0.95 * CAPACITY_BYTES
        renames_many(renamer, kv, MANY)
        store(other, kv / "in place")
        assert os.getxattr(kv / "in place", "user.kvfs.state") == b"leased"
        assert set(kept) < set(kv.iterdir())
        # Its own again, once it lets go.
        for path in kept[:8]:
            keeper.os("unlink", str(path))
        store(keeper, kv / "again")
        # And a store that it renames is nobody's.
        renames_many(keeper, kv, 4)


def test_children_do_not_lengthen_what_a_user_may_keep(kv: Path) -> None:
    with contextlib.ExitStack() as stack, callers(2) as (renamer, other):
        for _ in range(20):
            child = stack.enter_context(Caller(NOBODY, NOBODY))
            store_many(child, kv, MANY // 10)
        renames_many(renamer, kv, MANY)
        store(other, kv / "in place")
        assert os.getxattr(kv / "in place", "user.kvfs.state") == b"leased"


def test_temporary_names_are_kept_no_longer_than_there_is_room(kv: Path) -> None:
    """Their rename must not be refused; who leaves them lying loses them in their turn."""
    with callers(2) as (keeper, renamer):
        assert store_many(keeper, kv, MANY, ".tmp") == 0
        renames_many(renamer, kv, MANY)
        renames_many(keeper, kv, 10)


def test_a_directory_without_leases_takes_all(kv: Path) -> None:
    with callers(2) as (keeper, renamer):
        os.setxattr(kv, "user.kvfs.lease", b"none")
        try:
            assert store_many(keeper, kv, MANY) == 0
            newest = kv / f"{keeper.pid}-{MANY - 1:03}"
            assert os.getxattr(newest, "user.kvfs.lease") == b"none"
            assert os.getxattr(newest, "user.kvfs.state") == b"published"
            with newest.open("ab") as more:
                more.write(b"x")
            assert os.getxattr(newest, "user.kvfs.state") == b"published"
            renames_many(renamer, kv, MANY)
        finally:
            os.removexattr(kv, "user.kvfs.lease")
        store(keeper, kv / "leased")
        assert os.getxattr(kv / "leased", "user.kvfs.state") == b"leased"


def test_status_and_doctor_name_who_keeps_most_and_the_setting(pool: Mounted, kv: Path) -> None:
    with callers(1) as (keeper,):
        store_many(keeper, kv, MANY)
        status = pool.status()
        lessee = status["largest_lease_holder"]
        assert lessee["pid"] == keeper.pid
        assert lessee["bytes"] == status["leased_bytes"] > 0.9 * CAPACITY_BYTES
        assert lessee["stores_refused"] > 0
        shown = run_kvfs("status", str(pool.path)).stdout
        assert f"pid {keeper.pid}" in shown
        assert "lease_max" in shown
        told = run_kvfs("doctor", str(pool.path), check=False).stdout
        assert f"process {keeper.pid}" in told
        assert "lease_max" in told
        assert "user.kvfs.lease" in told


def test_who_writes_in_place_and_lives_on_needs_no_leases(pool: Mounted, kv: Path) -> None:
    """docs/connectors/README.md, "Any other program": with lease=none it is never refused."""
    directory = kv / "saved"
    directory.mkdir(0o777)
    directory.chmod(0o777)
    with Caller(NOBODY, NOBODY) as program:
        assert store_many(program, directory, 2 * MANY) > 0
        os.setxattr(directory, "user.kvfs.lease", b"none")
        assert store_many(program, directory, 2 * MANY, "-more") == 0
    for path in directory.iterdir():
        path.unlink(missing_ok=True)
    directory.rmdir()
