"""A budget of writes: over simulated days just that is written, whatever the load is like."""

import random
from collections import deque
from collections.abc import Callable
from typing import Final

import pytest

from kvfs.core.admission import GatedLru
from kvfs.core.write_budget import WriteBudget

DAY_S: Final = 86_400
BUDGET_BYTES: Final = 10**12
#: Seconds between two ticks of a simulated mount.
TICK_S: Final = 5
#: A write reaches the drive so many ticks after the verdict: half a minute.
LATE_TICKS: Final = 6
NEAR: Final = 0.1

Load = Callable[[float, float], float]


def days_of(load: Load, days: int, budget: WriteBudget | None = None) -> list[float]:
    """Return what is written each day, in budgets.

    *load* returns what is written in a tick (in budgets a day) at a time (s) and at a price.
    """
    budget = budget or WriteBudget(BUDGET_BYTES)
    written, found = 0.0, []
    late = deque([0.0] * LATE_TICKS)
    for day in range(days):
        before = written
        for now_s in range(day * DAY_S, (day + 1) * DAY_S, TICK_S):
            late.append(load(now_s, budget.price) * TICK_S / DAY_S)
            written += late.popleft()
            budget.count(int(written * BUDGET_BYTES), now_s)
        found.append(written - before)
    return found


def stationary(seed: int) -> Load:
    """Kinds of blocks, each worth something and of some volume; together above the budget."""
    draw = random.Random(seed)
    kinds = [
        (draw.choice((0.02, 0.1, 0.4, 1.5, 6.0)) * draw.uniform(0.5, 2), draw.uniform(0.05, 3))
        for _ in range(draw.choice((1, 2, 5, 40)))
    ]
    factor = draw.uniform(1.3, 20) / sum(volume for _, volume in kinds)

    def load(_now_s: float, price: float) -> float:
        lumps = draw.choice((0.0, 0.5, 1.0, 2.5))
        return factor * lumps * sum(volume for worth, volume in kinds if worth >= price)

    return load


@pytest.mark.parametrize("seed", range(12))
def test_a_stationary_load_writes_the_budget(seed: int) -> None:
    days = days_of(stationary(seed), 4)
    assert sum(days) / len(days) == pytest.approx(1, abs=NEAR)
    assert days[1:] == pytest.approx([1] * 3, abs=NEAR)


def test_what_is_below_the_budget_is_written_all() -> None:
    budget = WriteBudget(BUDGET_BYTES)
    assert days_of(lambda _now_s, _price: 0.8, 2, budget)[1] == pytest.approx(0.8, abs=0.01)
    assert budget.price == 0


def test_a_busy_day_has_what_the_night_left() -> None:
    """Eight hours of load in each day, at 5 times the budget if all were written."""

    def load(now_s: float, price: float) -> float:
        busy = now_s % DAY_S < DAY_S // 3
        return 5.0 * (price <= 0.3) + 3.0 * (price <= 1.0) if busy else 0.0

    days = days_of(load, 5)
    assert max(days) < 1.1
    assert min(days[1:]) > 0.6


def test_a_load_that_changes_is_followed() -> None:
    """Every six hours other blocks are popular: volumes and worths change."""

    def load(now_s: float, price: float) -> float:
        draw = random.Random(int(now_s // (DAY_S / 4)))
        kinds = [(draw.uniform(0.03, 2), draw.uniform(0.1, 4)) for _ in range(12)]
        return sum(volume for worth, volume in kinds if worth >= price)

    days = days_of(load, 6)
    assert sum(days[1:]) / 5 == pytest.approx(1, abs=NEAR)
    assert max(days[1:]) < 1.2


def test_by_the_gate_itself_with_popularity_that_changes() -> None:
    """The gate learns and judges; popular blocks are others each few hours."""
    draw, gate = random.Random(3), GatedLru(400, budget_bytes=BUDGET_BYTES)
    budget, size_bytes, ticks = gate.budget, BUDGET_BYTES // 300, DAY_S // 30
    held: dict[int, None] = {}
    written, days = 0, []
    for tick in range(ticks * 5):
        now_s, before = tick * 30.0, written
        era = tick // (ticks // 4)
        popular = [(era << 16) + int(draw.paretovariate(0.6)) % 3000 for _ in range(4)]
        burst = [(name * 2_654_435_761 + 7) % 2**32 for name in (*popular, draw.randrange(1 << 40))]
        burst = list(dict.fromkeys(burst))
        verdicts = gate.judge(burst, [1 if name in held else 0 for name in burst])
        for name, worthy in zip(burst, verdicts, strict=True):
            written += size_bytes * (worthy and name not in held)
            if worthy or name in held:
                held.pop(name, None)
                held[name] = None
        while len(held) > 400:
            gone = next(iter(held))
            del held[gone]
            gate.evicted(gone, 1, 1)
        budget.count(written, now_s)
        if tick % ticks == 0:
            days.append(0.0)
        days[-1] += (written - before) / BUDGET_BYTES
    assert sum(days[1:]) / 4 == pytest.approx(1, abs=NEAR)


def test_it_says_what_was_used() -> None:
    budget = WriteBudget(BUDGET_BYTES)
    assert budget.used_share(1) is None
    for hour in range(30):
        budget.count(BUDGET_BYTES // 12 * hour, hour * 3600.0)
    budget.count(BUDGET_BYTES // 12 * 29 + BUDGET_BYTES // 48, 29.5 * 3600)
    assert budget.used_share(24) == pytest.approx(1.97, abs=0.02)
    assert budget.used_share(1) == pytest.approx((1 / 12 + 1 / 48) * 24 / 1.5)
    assert budget.price > 0


def test_it_goes_on_after_a_restart_also_with_another_budget() -> None:
    budget = WriteBudget(BUDGET_BYTES)
    days_of(lambda _now_s, _price: 3.0, 1, budget)
    after = WriteBudget(2 * BUDGET_BYTES)
    after.recall(*budget.state)
    assert after.price == budget.price > 0
    assert after.state == budget.state
    after.recall(float("nan"), 0.0)
    assert after.state == budget.state


def test_debts_and_prices_and_what_is_left_are_bounded() -> None:
    budget = WriteBudget(BUDGET_BYTES)
    budget.count(0, 0.0)
    budget.count(1000 * BUDGET_BYTES, 10.0)
    highest = budget.price, budget.state[1]
    budget.count(3000 * BUDGET_BYTES, 20.0)
    assert (budget.price, budget.state[1]) == highest
    budget.count(3000 * BUDGET_BYTES, 1e9)
    lowest = budget.state
    budget.count(3000 * BUDGET_BYTES, 2e9)
    assert budget.state == lowest
    assert budget.price == 0
    assert lowest[1] == -highest[1] == -0.5
    unlimited = WriteBudget(0)
    unlimited.count(10**18, 1.0)
    unlimited.count(10**19, 2.0)
    assert unlimited.price == 0


def test_some_is_written_while_much_is_overdrawn() -> None:
    budget = WriteBudget(BUDGET_BYTES)
    budget.count(0, 0.0)
    budget.count(BUDGET_BYTES, 1.0)
    written = BUDGET_BYTES
    dear = budget.price
    for tick in range(1, 2000):
        written += BUDGET_BYTES * TICK_S // DAY_S // 20
        budget.count(written, 1.0 + tick * TICK_S)
    assert budget.price < dear
