"""What a server remembers and does in one go is bounded, whatever clients do.

What it forgot is looked up again.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvfs.core.account import Accounts
from kvfs.core.errors import Damaged, NotAtHand
from kvfs.core.eviction_policy import Columns, Rank
from kvfs.core.inode_rules import blank_record
from kvfs.core.lifecycle import State
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, InodeNo
from kvfs.engine.names.named import hottest
from kvfs.engine.recovery.file_claims import ClaimsAtHand
from kvfs.machine.processes import Maker
from kvfs.pool.departures import REMOVED_MAX, RecentlyRemoved
from kvfs.pool.figures.held_by_model import Folders
from kvfs.pool.open.open_inodes import Hand, Hands
from kvfs.pool.rules.leases import Leases, LeaseShares
from kvfs.pool.rules.paths import Paths
from kvfs.pool.rules.policies import Policies
from kvfs.pool.space.space import Space
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.extents_at_hand import ExtentsAtHand
from kvfs.storage.outliving import Lacks, Outliving, UndurableTable
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.mounts.mounting import workplace
from tests.support.store.deep_index import DeepIndex
from tests.support.store.fake_loop import FakeLoop
from tests.support.store.life_model import NO_PID, Lives

FILE = 0o100644
MIB = 1 << 20


@contextlib.contextmanager
def opened_extents(place: Path, syscalls: Syscalls) -> Iterator[Extents]:
    pool_fd = os.open(place, os.O_RDONLY)
    extents = Extents((pool_fd,), syscalls, "tmpfs")
    try:
        yield extents
    finally:
        extents.close()
        os.close(pool_fd)


def folders_of(index: DeepIndex) -> Callable[[InodeNo], object]:
    return Folders(index).above


def paths_of(index: DeepIndex) -> Callable[[InodeNo], object]:
    return Paths(index).of


def policies_of(index: DeepIndex) -> Callable[[InodeNo], object]:
    return Policies(index, {}).of


@pytest.mark.parametrize(
    ("asking", "name", "count"),
    [(folders_of, b"d", 4096), (paths_of, b"d" * 255, 300), (policies_of, b"d", 4096)],
    ids=["folders", "paths", "policies"],
)
def test_of_many_directories_what_was_found_first_is_forgotten(
    asking: Callable[[DeepIndex], Callable[[InodeNo], object]], name: bytes, count: int
) -> None:
    index = DeepIndex(name)
    ask = asking(index)
    first = ask(InodeNo(40))
    for ino in range(41, 41 + count):
        ask(InodeNo(ino))
    before = index.reads
    ask(InodeNo(40 + count))
    assert index.reads == before, "what was found last is remembered"
    ask(InodeNo(40))
    assert index.reads > before
    # Each of the three answers with another kind of sequence.
    assert asking(DeepIndex(name))(InodeNo(40))[0] == first[0]  # type: ignore[index]


def test_leases_that_are_equal_share_what_says_so_and_others_are_not_kept_for_ever() -> None:
    shares = LeaseShares(Accounts(), lambda: MIB, lambda: MIB)
    leases = Leases(Lives(), 10.0, shares, lambda: 0.0, same_boot=True)
    ino = InodeNo(20)
    for size_bytes in range(5000):
        record = blank_record(ROOT_INODE, b"a", FILE, 0, 0, 0)._replace(
            state=State.LEASED,
            allocated_bytes=size_bytes,
            maker_tgid=NO_PID,
            maker_birth=1,
        )
        leases.put(ino, record, 0.0)
    assert len(leases._kinds) < 4200


def test_of_many_writers_of_one_block_the_last_are_remembered() -> None:
    opened = Hands()
    opened.writers = 1
    hands = [Hand(Maker(NO_PID, birth), birth) for birth in range(100)]
    for hand in hands:
        opened.note_hand(hand, appends=False)
        opened.writers += 1
    assert opened.hands == tuple(hands[-64:])


def test_of_many_removed_blocks_the_oldest_are_erased_at_once() -> None:
    erased: list[InodeNo] = []
    space = Space(100 * MIB, 0)
    removed = RecentlyRemoved(lambda _: space, space, lambda ino, _: erased.append(ino))
    record = blank_record(ROOT_INODE, b"a", FILE, 0, 0, 0)
    for ino in range(REMOVED_MAX + 2):
        removed.keep(InodeNo(ino), record, 0.0)
    assert erased == [0, 1]
    assert len(removed) == REMOVED_MAX


@pytest.fixture
def undurable() -> Iterator[UndurableTable]:
    fd = os.memfd_create("undurable")
    table = UndurableTable(fd, 4)
    yield table
    table.close()
    os.close(fd)


def test_an_impossible_number_has_no_row_and_is_told(undurable: UndurableTable) -> None:
    """From a damaged INODES: a start compares all blocks then."""
    undurable.put(Lacks.BYTES, InodeNo((1 << 62) - 1), 1.0)
    assert not undurable.is_lacking
    undurable.put(Lacks.BYTES, InodeNo(1 << 62), 1.0)
    assert undurable.is_lacking
    assert [row.ino for row in undurable.rows()] == [(1 << 62) - 1]


def test_rows_that_went_make_room_for_others(undurable: UndurableTable) -> None:
    """A table that only grew would be full after so many blocks: a start searches for all then."""
    for ino in range(1, 5000):
        undurable.put(Lacks.BYTES, InodeNo(ino), 1.0)
        undurable.drop(Lacks.BYTES, InodeNo(ino))
    assert not undurable.is_lacking
    assert undurable.rows() == []


def test_of_all_blocks_so_many_of_the_hottest_are_listed() -> None:
    count = (1 << 16) + 10
    columns = Columns(
        ino=np.arange(1, count + 1, dtype=np.uint64),
        touched=np.arange(count, dtype=np.uint64),
        touches=np.ones(count, dtype=np.uint16),
        allocated_bytes=np.ones(count, dtype=np.uint64),
        rank=np.full(count, Rank.PUBLISHED, dtype=np.uint8),
    )
    found = hottest(columns)
    assert (len(found), found[0]) == (1 << 16, count)


def test_of_many_holes_in_a_reserve_only_the_first_are_looked_for() -> None:
    """Each takes a call or two, and a client waits for its close."""
    calls = FailingSyscalls(["lseek"])
    with workplace() as place, opened_extents(place, calls) as extents:
        fd = extents.create(InodeNo(20), 8 * MIB)
        for number in range(1000):
            os.pwrite(fd, b"x", number * 2 * 4096)
        extents.trim_holes(fd, 8 * MIB)
        os.close(fd)
    assert 256 <= calls.calls <= 2 * 256


def test_what_a_pool_remembers_of_evicted_names_takes_a_mib() -> None:
    fds = [os.memfd_create(name) for name in ("journal", "notes", "undurable", "evicted")]
    outliving = Outliving.at(*fds, 100)
    assert os.fstat(fds[-1]).st_size <= MIB + 2 * PAGE_BYTES
    outliving.close()


# ---- what threads fetched for requests that will ask again ----


class Serving(NamedTuple):
    """What fetches from the extents of a pool, while a loop serves."""

    extents: Extents
    background: Background
    loop: FakeLoop
    syscalls: Syscalls


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    background, loop = Background(1000), FakeLoop()
    background.begin_serving(loop)
    with opened_extents(tmp_path, Syscalls()) as extents:
        yield Serving(extents, background, loop, Syscalls())
        background.end_serving()
        background.stop()


def fetch(ask: Callable[[InodeNo], object], ino: InodeNo) -> None:
    """Have a thread fetch what *ask* for *ino* lacks, as a request does that waits."""
    with pytest.raises(NotAtHand) as lack:
        ask(ino)
    lack.value.begin()()()


def test_of_many_extents_the_last_are_kept(serving: Serving) -> None:
    at_hand = ExtentsAtHand(serving.extents, serving.background, serving.syscalls)

    def ask(ino: InodeNo) -> object:
        return at_hand.open(ino, os.O_RDONLY)

    for ino in range(100, 165):
        fetch(ask, InodeNo(ino))
    with pytest.raises(NotAtHand):
        ask(InodeNo(100))
    for ino in (101, 164):
        with pytest.raises(Damaged):
            ask(InodeNo(ino))


def test_of_many_files_what_the_last_say_is_kept(serving: Serving) -> None:
    claims = ClaimsAtHand(serving.extents, serving.background, serving.syscalls)
    asks = serving.background.of(InodeNo(100)).asks
    for first in (100, 700):
        claims.read_ahead(map(InodeNo, range(first, first + 600)))
        serving.loop.run_until(lambda: not asks.pending, "all are read")
    with pytest.raises(NotAtHand):
        claims.of(InodeNo(100))
    assert claims.of(InodeNo(1299)) is None
