"""The gate judges what is stored: what is worth it moves to its drive, the rest goes first."""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from kvfs.core.admission import MountedGate
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.probation_host import ROOM_BYTES, content, publish
from tests.support.store.stores import Host, assert_exact, get, host, put, write

pytestmark = pytest.mark.usefixtures("caplog")

#: Blocks that the pool has before the gate learns.
HELD = 24
#: By how much each burst ends later than the one before, and than the clock says.
_LATER_S = itertools.count(100, 100)
#: Names that nobody asks for twice.
ONCE = 2000


@pytest.fixture(params=[0, ROOM_BYTES], ids=["no memory", "memory"])
def pool(request: pytest.FixtureRequest) -> Iterator[Host]:
    with host() as made:
        made.settings = dataclasses.replace(made.settings, eviction="gate")
        made.give_memory(request.param)
        made.start_outliving()
        put(made.store, ROOT_INODE, b"first", content(99))
        try:
            yield made
        finally:
            made.forget_outliving()


def judge(pool: Host) -> None:
    """Let the burst end, and be judged; what is worth it moves."""
    later_s = pool.store.now_s() + next(_LATER_S)
    pool.store.tick_heat(later_s)
    pool.store.judge(later_s)
    pool.store.tick()
    for _ in range(8):  # each may let the next one wait
        pool.store.begin_moves()
        pool.store.drain()


def learn(pool: Host) -> None:
    """Let the gate see many names that nobody asks for again."""
    for at in range(HELD):
        publish(pool, b"held%d" % at, content(at))
    judge(pool)
    gate = pool.store.judges_by
    assert isinstance(gate, MountedGate)
    for at in range(ONCE):
        gate.judge([at * 2_654_435_761 % 2**32], [0])
    assert gate.threshold > 0


def store_new(pool: Host) -> InodeNo:
    """Store one block; several would not be in one burst of so small a pool."""
    return publish(pool, b"new", content(1))


def test_while_nothing_is_known_all_is_worth_a_write(pool: Host) -> None:
    ino = store_new(pool)
    judge(pool)
    assert pool.store.admitted > 0
    assert pool.store.turned_away == 0
    assert not pool.in_memory(ino).exists()
    assert get(pool.store, ROOT_INODE, b"new") == content(1)


def test_what_is_not_worth_it_stays_in_memory_and_goes_first(pool: Host) -> None:
    learn(pool)
    ino = store_new(pool)
    judge(pool)
    assert pool.store.turned_away == 1
    assert pool.in_memory(ino).exists() == bool(pool.settings.probation_bytes)
    pool.store.evict(len(content(1)))
    assert pool.store.name_row(ROOT_INODE, b"new") is None
    assert get(pool.store, ROOT_INODE, b"first") == content(99)
    assert_exact(pool)


def test_a_store_that_goes_on_in_the_next_burst_is_one_use(pool: Host) -> None:
    """It is closed, read by its writer, renamed and appended to, each in a burst of its own."""
    learn(pool)
    before = pool.store.admitted + pool.store.turned_away
    ino = put(pool.store, ROOT_INODE, b"new.tmp", content(1))
    judge(pool)
    assert get(pool.store, ROOT_INODE, b"new.tmp") == content(1)
    judge(pool)
    pool.store.rename(ROOT_INODE, b"new.tmp", ROOT_INODE, b"new")
    assert pool.store.heat()[ino].touches == 1
    judge(pool)
    assert pool.store.admitted + pool.store.turned_away == before + 1
    writer = pool.store.open(ino, writer=True, truncate=False, reads=False)
    write(pool.store, writer, b"more")
    pool.store.close(writer, writer=True)
    assert pool.store.heat()[ino].touches <= 1
    assert_exact(pool)


def test_a_second_use_moves_what_was_turned_away(pool: Host) -> None:
    learn(pool)
    ino = store_new(pool)
    judge(pool)
    get(pool.store, ROOT_INODE, b"new")
    judge(pool)
    assert not pool.in_memory(ino).exists()
    pool.store.evict(len(content(1)))
    assert get(pool.store, ROOT_INODE, b"new") == content(1), "it was used, and others were not"
    assert_exact(pool)


def test_while_nothing_is_used_nothing_is_judged(pool: Host) -> None:
    judge(pool)
    before = pool.store.admitted, pool.store.turned_away
    judge(pool)
    assert (pool.store.admitted, pool.store.turned_away) == before


def test_with_a_budget_a_second_use_is_no_reason_to_write() -> None:
    """So little may be written a day that nothing new is worth its price."""
    with host() as made:
        made.settings = dataclasses.replace(made.settings, eviction="gate", write_budget_bytes=100)
        made.give_memory(ROOM_BYTES)
        made.start_outliving()
        try:
            put(made.store, ROOT_INODE, b"first", content(99))
            for at in range(4):
                publish(made, b"held%d" % at, content(at))
                judge(made)
            gate = made.store.judges_by
            assert isinstance(gate, MountedGate)
            assert gate.budget.price > 1
            ino = store_new(made)
            judge(made)
            assert get(made.store, ROOT_INODE, b"new") == content(1)
            judge(made)
            assert made.in_memory(ino).exists()
            assert_exact(made)
        finally:
            made.forget_outliving()


def test_what_is_used_again_is_no_new_block(pool: Host) -> None:
    learn(pool)
    before = pool.store.admitted, pool.store.turned_away
    get(pool.store, ROOT_INODE, b"held0")
    judge(pool)
    assert (pool.store.admitted, pool.store.turned_away) == before
