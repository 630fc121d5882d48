"""The report of a check: what it counts, and how much of it it says."""

from kvfs.engine.recovery.fsck_rows import PROBLEMS_MAX, FsckReport


def test_a_report_of_a_million_problems_stays_small() -> None:
    report = FsckReport()
    for number in range(PROBLEMS_MAX * 3):
        report.problem(f"problem {number}")
    assert report.found == PROBLEMS_MAX * 3
    assert len(report.problems) == PROBLEMS_MAX + 1
