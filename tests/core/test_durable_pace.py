"""When blocks are made durable: late while clients store, and never past the window for nothing."""

from typing import Final

import pytest

from kvfs.core.durable_pace import DurableGoal, Pace

WINDOW_S: Final = 10.0
NOW_S: Final = 1000.0


@pytest.fixture
def pace() -> Pace:
    return Pace(WINDOW_S)


def is_due(pace: Pace, waited_s: float, *, busy: bool = False, urgent: bool = False) -> bool:
    """Whether the pass begins when the oldest block has waited for so long."""
    return pace.is_due(NOW_S, NOW_S - waited_s, busy=busy, urgent=urgent)


@pytest.mark.parametrize(("busy", "share"), [(True, 0.5), (False, 0.1)])
def test_a_block_waits_for_its_share_of_the_window(pace: Pace, share: float, *, busy: bool) -> None:
    assert pace.due_before_s(NOW_S, busy=busy, urgent=False) == NOW_S - share * WINDOW_S
    assert not is_due(pace, share * WINDOW_S - 0.1, busy=busy)
    assert is_due(pace, share * WINDOW_S, busy=busy)


def test_who_waits_for_all_has_all_begun_at_once(pace: Pace) -> None:
    pace.note_ended(NOW_S, 100.0, full=True)
    assert pace.due_before_s(NOW_S, busy=True, urgent=True) == NOW_S
    assert is_due(pace, 0.0, busy=True, urgent=True)
    assert is_due(Pace(0), 0.0, urgent=True)


def test_without_a_window_nothing_begins_by_itself() -> None:
    assert not is_due(Pace(0), 1e6)
    assert not Pace(0).is_late(1e6)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("took_s", [0.1, 2.0])
def test_after_a_batch_the_device_is_the_clients_for_as_long_as_it_took(
    pace: Pace, took_s: float, *, full: bool
) -> None:
    """One that took all there was leaves it to them for a twentieth of the window at least."""
    pace.note_ended(NOW_S - 5.0, took_s, full=full)
    rests_s = took_s if full or took_s > 0.5 else 0.5
    for now_s, begins in ((NOW_S - 5.0 + rests_s - 0.01, False), (NOW_S - 5.0 + rests_s, True)):
        assert pace.is_due(now_s, now_s - 6.0, busy=True, urgent=False) == begins


def test_past_three_quarters_of_the_window_it_no_longer_rests(pace: Pace) -> None:
    pace.note_ended(NOW_S, 100.0, full=True)
    assert not is_due(pace, 7.5)
    assert is_due(pace, 7.6)


def test_late_is_what_waited_longer_than_the_window(pace: Pace) -> None:
    assert not pace.is_late(WINDOW_S)
    assert pace.is_late(WINDOW_S + 0.001)


def test_a_goal_is_none_until_it_is_known_what_must_be_durable() -> None:
    goal = DurableGoal(gaps=1, losses=2, moves=0)
    assert (goal.gaps, goal.losses, goal.rounds, goal.upto) == (1, 2, 2, ())
    assert not goal.is_set
    goal.flushes = (3,)
    assert goal.is_set
