"""The policies on a recorded hour of prompts: the hits that are known for them from elsewhere.

The figures are those of exact LRU and ARC, one victim at a time, and of the adaptive policy as it
is; docs/eviction.md has the table.
"""

from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvfs.bench.replay.trace import Request, footprint, read_trace
from kvfs.bench.simulate.served import Outcome, served
from kvfs.core.eviction_policy import Columns, EvictionPolicy, Lru, policy_named
from tests.support.store.trace import TRACE, Habits, replay_cleaned

#: Cache in percent of all blocks -> policy -> prefix hits and blocks written, in percent of all
#: accesses.
KNOWN: Final = {
    1: {"lru": (5.2, 95), "arc": (6.4, 94), "adaptive": (9.9, 89)},
    2: {"lru": (7.9, 92), "arc": (9.0, 91), "adaptive": (14.4, 85)},
    5: {"lru": (19.5, 80), "arc": (21.0, 79), "adaptive": (21.2, 79)},
    10: {"lru": (27.8, 72), "arc": (28.4, 72), "adaptive": (27.9, 72)},
    20: {"lru": (34.5, 66), "arc": (32.0, 68), "adaptive": (34.5, 65.5)},
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """The trace."""
    return read_trace(str(TRACE))


def outcome(requests: list[Request], policy: EvictionPolicy, percent: int) -> Outcome:
    """Replay *requests* on a pool of *percent* of their blocks."""
    found = served(requests, policy, footprint(requests) * percent // 100)
    name = type(policy).__name__
    print(f"{percent:3} % {name:10} {found.prefix_hits:6.2f} hits {found.written:6.2f} written")
    return found


def test_the_trace_is_the_one_that_the_figures_are_of(requests: list[Request]) -> None:
    assert len(requests) == 12_031
    assert sum(len(request.blocks) for request in requests) == 288_500
    assert footprint(requests) == 182_790


@pytest.mark.parametrize(
    "percent", [5, *(pytest.param(p, marks=pytest.mark.proof) for p in (1, 2, 10, 20))]
)
@pytest.mark.parametrize("policy", ["lru", "arc", "adaptive"])
def test_the_hits_are_those_of_the_exact_policy(
    requests: list[Request], policy: str, percent: int
) -> None:
    """Victims in batches, a burst as the unit of time, ghosts in a table: next to no difference."""
    prefix_hits, written = KNOWN[percent][policy]
    found = outcome(requests, policy_named(policy), percent)
    assert found.prefix_hits == pytest.approx(prefix_hits, abs=0.7)
    assert found.written == pytest.approx(written, abs=1.0)


#: The same for an XFS beside a cleaner from 90 to 80 %, by how often it looks (s).
CLEANED: Final = {
    2: {1: (6.8, 92), 60: (10.6, 16)},
    5: {1: (16.8, 83), 60: (17.4, 39)},
    10: {1: (24.2, 76), 60: (24.6, 72)},
}


@pytest.mark.parametrize("look_s", [1, 60])
@pytest.mark.parametrize(
    "percent", [5, *(pytest.param(p, marks=pytest.mark.proof) for p in (2, 10))]
)
def test_an_xfs_beside_a_cleaner_finds_less(
    requests: list[Request], percent: int, look_s: int
) -> None:
    """As `kvfs replay` measures it; the adaptive policy finds more at each size."""
    habits = Habits(0.9, 0.8, look_s)
    found = replay_cleaned(requests, habits, footprint(requests) * percent // 100)
    print(f"{percent:3} % every {look_s:2} s {found.prefix_hits:6.2f} hits {found.written:6.2f}")
    prefix_hits, written = CLEANED[percent][look_s]
    assert found.prefix_hits == pytest.approx(prefix_hits, abs=0.1)
    assert found.written == pytest.approx(written, abs=1.0)
    assert found.prefix_hits < KNOWN[percent]["adaptive"][0]


class HeadFirst(Lru):
    """LRU by the order of touches alone, under which a prompt's head goes before its tail."""

    def victims(
        self, columns: Columns, *, bytes_wanted: int, count_max: int, **_: object
    ) -> NDArray[np.uint64]:
        """Return the longest untouched."""
        rows = np.flatnonzero(columns.ino)
        rows = rows[np.argsort(columns.touched[rows])]
        ends_bytes = np.cumsum(columns.allocated_bytes[rows])
        return columns.ino[rows[: int(np.searchsorted(ends_bytes, np.uint64(bytes_wanted))) + 1]]


@pytest.mark.parametrize(
    "percent", [pytest.param(p, marks=pytest.mark.proof) for p in (1, 2, 5, 10, 20)]
)
def test_tails_before_heads_costs_nothing(requests: list[Request], percent: int) -> None:
    tails = outcome(requests, Lru(), percent)
    heads = outcome(requests, HeadFirst(), percent)
    assert tails.prefix_hits >= heads.prefix_hits - 0.1
