"""The gate: what it knows of names, which classes pay, which price, and what it writes."""

import random
from typing import Final

import pytest

from kvfs.core.admission import (
    CLASSES,
    NAMES_A_BLOCK,
    THRESHOLDS,
    TIMES_MAX,
    ClassRates,
    GatedLru,
    Hint,
    KnownNames,
    PriceTrials,
)

MILLION: Final = 1_000_000
#: Names as a hash makes them.
NAMES: Final = random.Random(1).sample(range(1 << 32), 40_000)


def test_a_name_is_known_with_how_often_it_was_asked_for() -> None:
    known = KnownNames(1000)
    for name, times in zip(NAMES, (1, 2, TIMES_MAX, TIMES_MAX + 9), strict=False):
        assert known.times(name) == 0
        known.remember(name, times)
        assert known.times(name) == min(times, TIMES_MAX)
    known.remember(NAMES[0], 3)
    assert known.times(NAMES[0]) == 3


def test_the_last_names_are_known_and_old_ones_are_not() -> None:
    blocks = 500
    known = KnownNames(blocks)
    for name in NAMES:
        known.remember(name, 1)
    late = NAMES[-NAMES_A_BLOCK * blocks // 2 :]
    assert sum(known.times(name) > 0 for name in late) > 0.95 * len(late)
    old = NAMES[: -4 * NAMES_A_BLOCK * blocks]
    assert sum(known.times(name) > 0 for name in old) < 0.01 * len(old)


def test_the_name_not_used_for_longest_gives_way() -> None:
    known = KnownNames(1)
    first, *others = NAMES[: NAMES_A_BLOCK + 1]
    for name in (first, *others[:-1], first, others[-1]):
        known.remember(name, 1)
    assert known.times(first) == 1
    assert known.times(others[0]) == 0


def test_memory_is_twenty_bytes_a_block_and_a_mib() -> None:
    assert GatedLru(MILLION).size_bytes <= 20 * MILLION + (1 << 20)
    assert GatedLru(1).size_bytes < 1 << 10


def test_a_class_whose_blocks_come_back_is_worth_more() -> None:
    rates = ClassRates(1000)
    rates.fade(0, stay=4000)
    for now, name in enumerate(NAMES[:1000]):
        rates.use(name, 1, now)  # comes back a thousand accesses later
        rates.use(NAMES[-1 - now], 2, now)  # never
    for now, name in enumerate(NAMES[:1000], 1000):
        rates.use(name, 3, now)
    assert rates.of(1) > 1
    assert rates.of(2) < 0.1
    assert rates.of(CLASSES - 1) == pytest.approx(0.5)


def test_what_comes_back_too_late_does_not_count() -> None:
    rates = ClassRates(1000)
    rates.fade(0, stay=500)
    for now, name in enumerate(NAMES[:1000]):
        rates.use(name, 1, now)
    for now, name in enumerate(NAMES[:1000], 1000):
        rates.use(name, 3, now)
    assert rates.of(1) < 0.1


def test_what_was_learned_fades() -> None:
    rates = ClassRates(1000)
    for now, name in enumerate(NAMES[:1000]):
        rates.use(name, 1, now)
    before = rates.of(1)
    for now in range(1000, 20_000, 100):
        rates.fade(now, stay=1000)
    assert before < 0.01
    assert rates.of(1) == pytest.approx(0.5, abs=0.01)


def test_a_flood_of_what_is_worth_little_raises_the_threshold() -> None:
    trials = PriceTrials(100)
    assert trials.threshold == THRESHOLDS[0]
    for number in range(50):
        for name in range(50):
            trials.use(name, 0.45, price=0.05)
        for name in range(1000 + 400 * number, 1400 + 400 * number):
            trials.use(name, 0.01, price=0.05)
    assert 0.01 < trials.threshold < 0.45


def test_where_all_fits_nothing_is_kept_out() -> None:
    trials = PriceTrials(100)
    for _ in range(50):
        for name in range(90):
            trials.use(name, 0.01, price=0.05)
    assert trials.threshold == THRESHOLDS[0]


def test_a_higher_price_writes_less() -> None:
    """Blocks that come back one time in ten pay at a low price and not at a high one."""
    thresholds = []
    for price in (0.01, 0.5):
        trials = PriceTrials(200)
        draw = random.Random(1)
        for fresh in range(20_000):
            trials.use(fresh, 0.12, price)
            if not draw.randrange(10):
                trials.use(fresh - draw.randrange(100), 0.12, price)
        thresholds.append(trials.threshold)
    assert thresholds[0] < 0.12 < thresholds[1]


def written_of(gate: GatedLru, bursts: list[list[int]], hint: Hint = Hint.NONE) -> int:
    """Return how many blocks *gate* admits of *bursts*, of which a pool has nothing."""
    return sum(sum(gate.judge(burst, [0] * len(burst), hint)) for burst in bursts)


def test_what_never_comes_back_is_kept_out_and_what_does_comes_in() -> None:
    gate = GatedLru(500)
    popular = [NAMES[at : at + 10] for at in range(0, 300, 10)]
    flood = [NAMES[at : at + 50] for at in range(1000, 39_000, 50)]
    for number, burst in enumerate(flood):
        gate.judge(popular[number % len(popular)], [0] * 10)
        gate.judge(burst, [0] * 50)
    fresh = [[name + 1 for name in burst] for burst in flood[:10]]
    assert written_of(gate, popular) == 300
    assert written_of(gate, fresh) < 0.1 * 500


def test_a_hint_is_believed_as_far_as_it_was_right() -> None:
    """Bursts that are alike but for the hint: of the ones that go on half come back."""
    gate = GatedLru(500)
    bursts = [NAMES[at : at + 10] for at in range(0, 40_000, 10)]
    for number, burst in enumerate(bursts[:3000]):
        gate.judge(burst, [0] * 10, Hint.GOES_ON if number % 4 == 0 else Hint.ONCE)
        if number % 8 == 0:
            gate.judge(burst, [1] * 10)
    fresh = bursts[3000:]
    assert written_of(gate, fresh[:20], Hint.GOES_ON) > 100
    assert written_of(gate, fresh[20:40], Hint.ONCE) == 0


def test_an_evicted_name_is_known_when_it_is_stored_again() -> None:
    gate = GatedLru(100)
    gate.judge([NAMES[0]], [0])
    assert not gate.admitted(NAMES[0], 1)
    gate.evicted(NAMES[1], 1, touches=2)
    assert gate.admitted(NAMES[1], 1)


def test_where_nothing_is_written_what_came_long_ago_does_not_count_either() -> None:
    """A block would stay for ever, but the names of so many accesses are not remembered."""
    gate = GatedLru(100)
    for name in NAMES[:20_000]:
        gate.judge([name], [1])
    assert gate._rates._horizon < 24 * 100
