"""Several set-ups of one comparison: who runs which pairs, and how they become one result."""

import pytest

from kvfs.bench.comparison import ComparisonOutcome, join, split_pairs
from kvfs.bench.jobs import Job, JobKind, JobRuns, Sample, Work

JOB = Job(JobKind.STAT, 1)
WORK = Work(8, 1, 1)


def outcome(wall_s: float, rss_anon_bytes: int | None) -> ComparisonOutcome:
    """One set-up that ran one pair of one job."""
    runs = JobRuns(JOB, WORK, [Sample(wall_s, None)], [Sample(wall_s * 2, 0.5)])
    setting = {"pairs": 1, "rss_anon_bytes": rss_anon_bytes, "elapsed_s": 1.25, "kvfs": "x"}
    return ComparisonOutcome([runs], setting)


@pytest.mark.parametrize(
    ("pairs", "set_ups", "expected"),
    [
        (9, 3, [range(3), range(3, 6), range(6, 9)]),
        (7, 3, [range(2), range(2, 4), range(4, 7)]),
        (2, 3, [range(1), range(1, 2)]),
        (5, 1, [range(5)]),
    ],
)
def test_every_pair_is_run_by_one_set_up(pairs: int, set_ups: int, expected: list[range]) -> None:
    assert split_pairs(pairs, set_ups) == expected


def test_the_pairs_of_all_set_ups_are_one_result() -> None:
    found = join([outcome(1.0, 100), outcome(3.0, 300), outcome(2.0, 200)])
    (runs,) = found.runs
    assert [sample.wall_s for sample in runs.baseline] == [1.0, 3.0, 2.0]
    assert [sample.wall_s for sample in runs.kvfs] == [2.0, 6.0, 4.0]
    assert (runs.job, runs.work) == (JOB, WORK)
    assert found.setting == {
        "pairs": 3,
        "set_ups": 3,
        "rss_anon_bytes": 300,
        "elapsed_s": 3.8,
        "kvfs": "x",
    }


def test_without_a_server_there_is_no_memory_to_report() -> None:
    assert join([outcome(1.0, None)]).setting["rss_anon_bytes"] is None
