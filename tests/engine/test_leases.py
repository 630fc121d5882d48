"""The table of leases and slabs: they end with their makers, or with time."""

import pytest

from kvfs.core.account import Accounts
from kvfs.core.lifecycle import State
from kvfs.core.types import ROOT_INODE, InodeNo, InodeRecord, Sequence
from kvfs.machine.processes import NOBODY, Maker
from kvfs.pool.rules.leases import Leases, LeaseShares
from tests.support.store.life_model import NO_PID, Lives
from tests.support.store.stores import FILE, MIB

ONE = Maker(NO_PID, 1)
OTHER = Maker(NO_PID + 1, 2)
LEASE_S = 10.0


class Table:
    """Holdings on their own, with what they settled."""

    def __init__(self) -> None:
        self.lives = Lives()
        shares = LeaseShares(Accounts(), lambda: MIB, lambda: MIB)
        self.leases = Leases(self.lives, LEASE_S, shares, lambda: 0.0, same_boot=True)
        self.settled: list[InodeNo] = []
        self.refused: set[InodeNo] = set()

    def tick(self, now_s: float) -> None:
        self.leases.run_due(now_s, self.settle)

    def settle(self, ino: InodeNo) -> bool:
        if ino in self.refused:
            return False
        self.settled.append(ino)
        self.leases.drop(ino)
        return True

    def note(self, ino: int, state: State, maker: Maker, now_s: float = 0.0) -> None:
        record = InodeRecord(
            FILE, 0, 0, state, 1, 4096, 0, 0, 0, 0, ROOT_INODE, 0, 0, Sequence(1), b"a", b"", *maker
        )
        self.leases.put(InodeNo(ino), record, now_s)


@pytest.fixture
def table() -> Table:
    return Table()


def test_a_lease_ends_with_its_maker(table: Table) -> None:
    table.lives.begin(ONE)
    table.lives.begin(OTHER)
    table.note(20, State.LEASED, ONE)
    table.note(21, State.SLAB, ONE)
    table.note(22, State.LEASED, OTHER)
    table.tick(1e9)
    assert table.settled == []
    table.lives.end(ONE)
    table.tick(0.0)
    assert table.settled == [20, 21]
    assert [ino for ino, _ in table.leases.rows()] == [22]


def test_a_lease_without_a_process_to_watch_ends_some_time_after_its_last_use(table: Table) -> None:
    table.note(20, State.LEASED, NOBODY, 0.0)
    table.note(21, State.SLAB, NOBODY, 1.0)
    table.leases.touch(InodeNo(20), 5.0)
    table.tick(LEASE_S + 0.9)
    assert table.settled == []
    table.tick(LEASE_S + 1.0)
    assert table.settled == [21]
    table.tick(LEASE_S + 5.0)
    assert table.settled == [21, 20]


def test_what_a_dead_process_made_is_settled_at_the_next_tick(table: Table) -> None:
    table.note(20, State.LEASED, ONE)
    table.tick(0.0)
    assert table.settled == [20]


def test_what_cannot_be_settled_is_tried_again(table: Table) -> None:
    table.refused.add(InodeNo(20))
    table.note(20, State.SLAB, ONE)
    table.tick(0.0)
    table.tick(0.0)
    assert table.settled == []
    table.refused.clear()
    table.tick(0.0)
    assert table.settled == [20]


def test_what_cannot_be_settled_keeps_nothing_else_waiting(table: Table) -> None:
    """Slabs that somebody has open for writing may stay so for days, however many they are."""
    slabs, leases, later = range(20, 520), range(1000, 1100), range(2000, 2100)
    table.refused.update(InodeNo(ino) for ino in slabs)
    for ino in slabs:
        table.note(ino, State.SLAB, ONE)  # who is dead
    table.lives.begin(OTHER)
    for ino in leases:
        table.note(ino, State.LEASED, OTHER)
    table.tick(0.0)
    table.lives.end(OTHER)
    for ino in later:
        table.note(ino, State.LEASED, ONE)
    for _ in range(20):
        table.tick(0.0)
    assert sorted(table.settled) == [*leases, *later]


def test_what_a_dead_process_left_keeps_nothing_else_waiting(table: Table) -> None:
    table.lives.begin(OTHER)
    for ino in range(1000, 3000):
        table.note(ino, State.LEASED, OTHER)
    table.lives.end(OTHER)
    table.note(20, State.LEASED, ONE)
    table.tick(0.0)
    assert 20 in table.settled
    assert len(table.settled) > 64
    table.note(21, State.LEASED, ONE)
    table.tick(0.0)
    assert 21 in table.settled


def test_a_block_made_anew_before_its_turn_is_left_alone(table: Table) -> None:
    table.note(20, State.REWRITTEN, ONE)
    table.lives.begin(OTHER)
    table.note(20, State.REWRITTEN, OTHER)
    table.note(21, State.REWRITTEN, ONE)
    table.note(21, State.REWRITTEN, NOBODY, 0.0)
    table.tick(0.0)
    assert table.settled == []


def test_a_million_leases_are_settled_over_many_ticks(table: Table) -> None:
    table.lives.begin(ONE)
    for ino in range(20, 1020):
        table.note(ino, State.LEASED, ONE)
    table.lives.end(ONE)
    table.tick(0.0)
    assert 0 < len(table.settled) < 1000
    while list(table.leases.rows()):
        table.tick(0.0)
    assert sorted(table.settled) == list(range(20, 1020))


@pytest.mark.parametrize("state", [State.ORPHAN, State.ORPHAN_SLAB])
def test_what_belongs_to_nobody_stays_listed_and_is_never_settled(
    table: Table, state: State
) -> None:
    table.note(20, state, NOBODY)
    table.tick(1e9)
    assert table.settled == []
    assert table.leases.state_of(InodeNo(20)) is state


def test_a_published_block_is_in_no_table(table: Table) -> None:
    table.note(20, State.LEASED, NOBODY)
    table.note(20, State.PUBLISHED, NOBODY)
    assert list(table.leases.rows()) == []
    table.tick(1e9)
    assert table.settled == []


def test_blocks_and_bytes_are_counted_by_state(table: Table) -> None:
    table.lives.begin(ONE)
    for ino in range(20, 25):
        table.note(ino, State.LEASED, ONE)
    table.note(20, State.SLAB, ONE)
    table.leases.drop(InodeNo(21))
    table.leases.drop(InodeNo(21))
    table.note(22, State.PUBLISHED, ONE)
    found: dict[State, tuple[int, int]] = {}
    for _, holding in table.leases.rows():
        blocks, size_bytes = found.get(holding.state, (0, 0))
        found[holding.state] = (blocks + 1, size_bytes + holding.allocated_bytes)
    assert found == {State.LEASED: (2, 8192), State.SLAB: (1, 4096)}
    assert {state: both for state, both in table.leases.totals.items() if both[0]} == found


def test_a_block_made_over_and_over_is_settled_once_and_a_lost_one_never(table: Table) -> None:
    table.lives.begin(ONE)
    for _ in range(5000):
        table.note(20, State.LEASED, ONE)
        table.note(21, State.LEASED, ONE)
        table.note(22, State.LEASED, ONE)
        table.leases.drop(InodeNo(22))
    table.lives.end(ONE)
    table.tick(0.0)
    assert table.settled == [20, 21]
