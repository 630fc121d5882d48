"""Predicted hit rates are those of an LRU pool: exactly, if every name is followed; else nearly."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.evicted import HASH_BITS, EvictedNames
from kvfs.core.reuse import FARTHEST, NOT_FOLLOWED, ReuseDistances, ReuseWatch
from kvfs.core.types import ROOT_INODE, InodeRecord
from kvfs.core.types import Sequence as SequenceNumber

BLOCK_BYTES: Final = 1 << 12
#: Of every power of two a pool holds the same number of blocks, and the histogram is exact.
POWERS: Final = range(8)


class LruPool:
    """A pool of so many blocks that evicts the least recently used."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._blocks_max = blocks_max
        self.hits = self.asked = 0

    def ask(self, name: int) -> bool:
        """A client asks for a block, and stores it if it is missing."""
        self.asked += 1
        found = name in self._blocks
        self.hits += found
        self._blocks[name] = None
        self._blocks.move_to_end(name)
        if len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
        return found


def watched(names: Iterable[int], names_max: int, blocks: int) -> tuple[ReuseDistances, LruPool]:
    """The distances that a pool of so many *blocks* sees of *names*, which are hashes."""
    distances, pool = ReuseDistances(names_max, blocks * BLOCK_BYTES), LruPool(blocks)
    for name in names:
        if pool.ask(name):
            distances.load(name, BLOCK_BYTES)
        else:
            distances.miss(name)
            distances.store(name, BLOCK_BYTES)
        distances.count(1)
    return distances, pool


def predicted(distances: ReuseDistances, blocks: Sequence[int]) -> list[float]:
    return [point.hit_rate for point in distances.curve(each * BLOCK_BYTES for each in blocks)]


def true_rates(names: Sequence[int], blocks: Sequence[int]) -> list[float]:
    rates = []
    for each in blocks:
        pool = LruPool(each)
        for name in names:
            pool.ask(name)
        rates.append(pool.hits / pool.asked)
    return rates


def skewed(count: int, names: int, seed: int) -> list[int]:
    """Hashes of names, of which few are asked for most."""
    rng = random.Random(seed)
    hashes = [rng.getrandbits(HASH_BITS) for _ in range(names)]
    return [hashes[int(names * rng.random() ** 3)] for _ in range(count)]


@given(names=st.lists(st.integers(0, 40), min_size=1, max_size=400), blocks=st.integers(1, 40))
def test_with_every_name_followed_it_is_exact(names: list[int], blocks: int) -> None:
    distances, _ = watched(names, 64, blocks)
    sizes = [1 << power for power in POWERS]
    assert predicted(distances, sizes) == pytest.approx(true_rates(names, sizes))
    assert distances.rate == 1


@given(
    names=st.lists(st.integers(0, 1 << HASH_BITS - 1), max_size=300), names_max=st.integers(1, 20)
)
def test_the_sample_is_bounded(names: list[int], names_max: int) -> None:
    distances, _ = watched(names, names_max, 4)
    assert len(distances) <= names_max
    assert all(0 <= rate <= 1 for rate in predicted(distances, [1, 4, 16]))


def test_positions_are_used_again_without_loss() -> None:
    """Many more references than positions."""
    names = [*range(50)] * 40
    distances, _ = watched(names, 64, 50)
    assert predicted(distances, [32, 64]) == pytest.approx(true_rates(names, [32, 64]))


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_is_near_the_truth(seed: int) -> None:
    names = skewed(60_000, 20_000, seed)
    blocks = [500, 1000, 2000, 4000, 8000]
    distances, pool = watched(names, 2048, 2000)
    assert distances.rate < 0.5
    rates = predicted(distances, blocks)
    assert rates == pytest.approx(true_rates(names, blocks), abs=0.03)
    assert rates[2] == pytest.approx(pool.hits / pool.asked, abs=0.03)
    assert rates == sorted(rates)


def test_names_that_no_pool_would_keep_give_way_first() -> None:
    """A stream of names that never come back does not lower the rate."""
    distances = ReuseDistances(256, 256 // (FARTHEST + 1) * BLOCK_BYTES)
    for name in range(20_000):
        distances.store(name, BLOCK_BYTES)
    assert distances.rate == 1
    assert len(distances) == 256


def test_hits_on_blocks_older_than_the_server_are_left_out() -> None:
    distances = ReuseDistances(64, 8 * BLOCK_BYTES)
    for name in (1, 2, 3):
        distances.load(name, BLOCK_BYTES)
    distances.miss(4)
    distances.store(4, BLOCK_BYTES)
    distances.count(4)
    assert predicted(distances, [4]) == [0]
    distances.load(1, BLOCK_BYTES)
    distances.count(1)
    assert predicted(distances, [2, 4]) == [0, 0.5]


def test_many_loads_at_once_are_one_distance_and_near_ones() -> None:
    distances = ReuseDistances(64, 8 * BLOCK_BYTES)
    for name in range(4):
        distances.store(name, BLOCK_BYTES)
    distances.load(0, BLOCK_BYTES, times=3)
    distances.count(3)
    assert predicted(distances, [1, 4]) == pytest.approx([2 / 3, 1])


def test_a_miss_without_a_store_is_a_use() -> None:
    """Whoever asked and stored nothing asks again: a larger pool would have had it both times."""
    distances = ReuseDistances(64, 8 * BLOCK_BYTES)
    for name in range(4):
        distances.store(name, BLOCK_BYTES)
    distances.miss(0)  # evicted by now: three others were used since
    distances.count(1)
    assert predicted(distances, [2, 4]) == pytest.approx([0, 1])
    distances.miss(0)  # and now nobody else was
    distances.count(1)
    assert len(distances) == 4
    assert predicted(distances, [1, 2, 4]) == pytest.approx([0.5, 0.5, 1])
    distances.miss(9)  # of a name that was never stored nobody knows the size
    distances.count(1)
    assert len(distances) == 4
    assert predicted(distances, [4]) == pytest.approx([2 / 3])


def test_a_removed_name_is_missed_by_every_pool() -> None:
    distances = ReuseDistances(64, 8 * BLOCK_BYTES)
    distances.store(1, BLOCK_BYTES)
    distances.forget(1)
    distances.miss(1)
    distances.count(1)
    assert predicted(distances, [64]) == [0]
    assert not len(distances)


def test_nothing_is_predicted_before_the_first_reference() -> None:
    distances = ReuseDistances(64, 8 * BLOCK_BYTES)
    distances.store(1, BLOCK_BYTES)
    assert predicted(distances, [1]) == []


def test_old_references_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the load the prediction follows it."""
    monkeypatch.setattr("kvfs.core.reuse._HALVED_AFTER", 100)
    distances, _ = watched([*range(60)], 128, 60)
    again, _ = watched(islice([*range(60)] * 20, 1200), 128, 60)
    assert predicted(distances, [64]) == [0]
    assert predicted(again, [64])[0] > 0.98


def block(number: int) -> InodeRecord:
    fields = (0o100644, 0, 0, 2, 4096, 4096, 0, 0, 0, 0, ROOT_INODE, 0, 0)
    return InodeRecord(*fields, SequenceNumber(number), b"%d" % number)


def test_a_watch_follows_so_many_names_and_no_more() -> None:
    watch = ReuseWatch(1 << 40, EvictedNames.of(16))
    for number in range(20_000):
        watch.stored(block(number), lambda: 0.0)
    again = (watch.followed(block(number)) for number in range(20_000))
    assert 1000 < sum(load != NOT_FOLLOWED for load in again) <= 4096


def test_of_many_loads_between_two_ticks_the_last_are_counted() -> None:
    watch = ReuseWatch(1 << 40, EvictedNames.of(16))
    for number in range(3000):
        watch.stored(block(number), lambda: 0.0)
    for number in range(3000):
        watch.loaded(watch.followed(block(number)))
    assert len(watch._loads) == 1024
    watch.count_loads()
    assert not watch._loads
