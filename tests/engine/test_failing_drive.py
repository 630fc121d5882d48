"""A store of three drives, one of which fails: what it costs is of that drive alone."""

from collections.abc import Iterator

import pytest

from tests.support.clients.stepping import until
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.stores import Host, assert_exact, tree
from tests.support.store.three_drives import DRIVES, store_nine, three_drives

pytestmark = pytest.mark.usefixtures("caplog")


@pytest.fixture
def guard() -> LoopGuard:
    return LoopGuard()


@pytest.fixture
def pool(guard: LoopGuard) -> Iterator[Host]:
    with three_drives(guard) as made:
        yield made


def others(found: dict[int, dict[bytes, bytes]], drive: int) -> dict[bytes, object]:
    """Return all paths that are not on *drive*."""
    return {path: data for at in found if at != drive for path, data in found[at].items()}


def ticks(pool: Host, lost: int) -> bool:
    pool.store.tick()
    pool.store.run_all()
    return bool(pool.store.describe()["lost_blocks"] >= lost)


@pytest.mark.parametrize("drive", range(DRIVES))
def test_a_failed_write_costs_what_its_own_drive_may_not_have(
    pool: Host, guard: LoopGuard, drive: int
) -> None:
    found = store_nine(pool)
    with (
        guard.failing("syncfs", below=pool.drives[drive]),
        pytest.raises(OSError, match="Input/output error"),
    ):
        pool.store.sync()
    until(lambda: ticks(pool, 3), "its blocks are dismissed")
    assert tree(pool.store) == others(found, drive)
    assert pool.store.describe()["write_back_failures"] == 1
    assert_exact(pool)
    pool.store.sync()
    pool.kill()
    assert tree(pool.start()) == others(found, drive)


@pytest.mark.parametrize("drive", range(DRIVES))
def test_what_is_durable_outlives_a_failed_write_of_its_drive(
    pool: Host, guard: LoopGuard, drive: int
) -> None:
    found = store_nine(pool)
    pool.store.sync()
    with (
        guard.failing("syncfs", below=pool.drives[drive]),
        pytest.raises(OSError, match="Input/output error"),
    ):
        pool.store.sync()
    ticks(pool, 0)  # which is told of the failure, and looks at all that may be lost
    assert pool.store.describe()["write_back_failures"] == 1
    ticks(pool, 0)
    assert tree(pool.store) == others(found, -1)


def test_a_failed_read_has_its_own_drive_looked_through(pool: Host, guard: LoopGuard) -> None:
    """Not those that nothing was heard of, although they could not be read now either."""
    found = store_nine(pool)
    with guard.failing("open"):
        pool.store.hear_of_failed_read(1)
        until(lambda: ticks(pool, 3), "its blocks are dismissed")
        ticks(pool, 0)
    assert tree(pool.store) == others(found, 1)
    assert_exact(pool)
