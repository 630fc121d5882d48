"""Marks tie the heat's stamps to times: never later than the truth, and never without a bound."""

import random

from kvfs.storage.age_clock import MARKS_MAX, HeatMarks

S = 1_000_000_000


def test_a_mark_is_no_later_than_what_is_asked_for() -> None:
    marks = HeatMarks()
    for second in range(10):
        marks.add(second * 2 * S, 100 + second)
    assert marks.stamp_at(-1) is None
    assert marks.stamp_at(0) == 100
    assert marks.stamp_at(7 * S) == 103
    assert marks.stamp_at(10**30) == 109


def test_while_nobody_touches_the_first_mark_stays() -> None:
    marks = HeatMarks()
    marks.add(5 * S, 7)
    marks.add(500 * S, 7)
    assert marks.stamp_at(6 * S) == 7


def test_a_clock_that_is_set_back_takes_its_marks_along() -> None:
    marks = HeatMarks()
    for second, stamp in ((10, 1), (2000, 2), (12, 3)):
        marks.add(second * S, stamp)
    assert marks.stamp_at(11 * S) == 1
    assert marks.stamp_at(3000 * S) == 3


def test_a_year_of_marks_is_bounded_and_holds() -> None:
    """At any time asked for, no touch that came later counts as earlier."""
    chance, marks, stamps = random.Random(1), HeatMarks(), []
    wall_ns = stamp = 0
    for _ in range(60_000):
        wall_ns += int(chance.expovariate(1 / 500) * S)
        stamp += chance.randrange(1, 1000)
        marks.add(wall_ns, stamp)
        stamps.append((wall_ns, stamp))
    assert len(marks.all()) <= MARKS_MAX
    for wall_ns, stamp in chance.sample(stamps, 1000):
        before = marks.stamp_at(wall_ns)
        assert before is not None
        assert before <= stamp
    newest_ns, newest = stamps[-1]
    assert marks.stamp_at(newest_ns) == newest
    # A week before the end is told within some hours.
    week_ns = newest_ns - 7 * 86_400 * S
    told = marks.stamp_at(week_ns)
    assert told is not None
    assert told >= next(one for at, one in reversed(stamps) if at <= week_ns - 6 * 3600 * S)


def test_the_only_old_mark_stays() -> None:
    """Two marks close together, a pause, a touch: what came before the pause is still old."""
    marks = HeatMarks()
    marks.add(10 * S, 1)
    marks.add(10 * S + S // 2, 3)
    marks.add(13 * S, 4)
    assert marks.stamp_at(11 * S) == 3
