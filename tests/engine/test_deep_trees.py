"""Whoever makes directories a thousand levels deep costs the server a bounded number of steps."""

import pytest

from kvfs.core.types import InodeNo
from kvfs.pool.figures.cache_figures import Tallies
from kvfs.pool.figures.held_by_model import DEPTH_MAX, OTHERS, Folders
from kvfs.pool.figures.looks import A_TICK, RENAME_LOOK_S, Looks
from kvfs.pool.rules.policies import Policies
from tests.support.store.deep_index import DeepIndex

LEVELS = 1000


def test_a_tally_is_found_in_a_few_steps() -> None:
    """What lies deeper than that counts with all others."""
    index = DeepIndex()
    tallies = Tallies(index, Folders(index), names_max=64)
    for ino in range(LEVELS, 2 * LEVELS, 2):
        tallies.of(InodeNo(ino), b"name").misses += 1
    assert index.reads <= LEVELS // 2 * DEPTH_MAX
    tallies.of(InodeNo(DEPTH_MAX), b"name").misses += 1
    shown = {name: tally.misses for name, tally in tallies.by_directory().items()}
    assert shown == {OTHERS: LEVELS // 2, "d": 1}


def test_a_tick_counts_a_bounded_number_of_looks() -> None:
    now_s = 0.0
    missed: list[bytes] = []
    looks = Looks(lambda: now_s, lambda _, name: missed.append(name), lambda *_: False)
    for number in range(2 * A_TICK):
        looks.add(InodeNo(2), b"%d" % number)
    now_s = RENAME_LOOK_S
    looks.settle(A_TICK)
    assert len(missed) == A_TICK
    looks.settle()
    assert len(missed) == 2 * A_TICK


@pytest.mark.parametrize("depth", [3, LEVELS, 5000])
def test_the_policies_of_a_deep_directory_are_found_in_one_walk(depth: int) -> None:
    """With policies in the settings, too, which go by path."""
    index = DeepIndex()
    policies = Policies(index, {"/d/d": {"lease": "none"}, "/d/d/d": {"evict": "first"}})
    found = policies.of(InodeNo(1 + depth))
    assert not found.leases
    assert found.evict == "first"
    assert index.reads <= 2 * (depth + 1)
    assert policies.of(InodeNo(1 + depth)) is found
    assert index.reads <= 2 * (depth + 1)
    assert policies.of(InodeNo(3)).evict != "first"
