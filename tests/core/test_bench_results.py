"""From runs to figures, and from figures to the table, the report and the picture."""

import io
import json
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from kvfs.bench.jobs import (
    Job,
    JobKind,
    JobResult,
    JobRuns,
    Mode,
    Sample,
    Work,
    daemon_costs,
    summarise,
)
from kvfs.bench.output import build_report, plot, results_table, row_of
from kvfs.core.sizes import MIB

STORE = Job(JobKind.STORE, 2, 4 * MIB, Mode.BUFFERED)
LOAD = Job(JobKind.LOAD, 2, 32 * MIB, Mode.BUFFERED)
SETTING = {"baseline": {"fs_type": "xfs"}, "pairs": 2}


def result_of(job: Job, baseline_s: float, kvfs_s: float, cpu_s: float | None) -> JobResult:
    """Two equal pairs of 100 operations."""
    return summarise(
        JobRuns(
            job,
            Work(50 // job.threads, 2, 1),
            [Sample(baseline_s, None)] * 2,
            [Sample(kvfs_s, cpu_s)] * 2,
        )
    )


def test_bytes_are_counted_in_gigabytes_a_second() -> None:
    found = result_of(STORE, 0.1, 0.2, None)
    assert found.unit == "GB/s"
    assert found.comparison.baseline.median == pytest.approx(100 * 4 * MIB / 1e9 / 0.1)
    assert found.comparison.ratio.median == pytest.approx(0.5)
    assert found.daemon_us is None


def test_lookups_are_counted_in_thousand_calls_a_second() -> None:
    found = result_of(Job(JobKind.STAT, 1), 0.001, 0.001, None)
    assert found.unit == "K/s"
    assert found.comparison.kvfs.median == pytest.approx(100.0)


def test_the_servers_time_is_per_operation_and_per_gigabyte() -> None:
    found = result_of(LOAD, 0.1, 0.1, 0.01)
    assert found.daemon_us is not None
    assert found.daemon_us.median == pytest.approx(100.0)
    assert found.daemon_ms_per_gb == pytest.approx(0.1 * 1e9 / (32 * MIB))


def test_a_goal_is_met_by_the_median() -> None:
    assert result_of(STORE, 0.45, 1.0, None).met is True
    assert result_of(STORE, 0.44, 1.0, None).met is False
    assert result_of(Job(JobKind.DELETE, 1, 4 * MIB), 1.0, 1.0, None).met is None


def test_costs_come_from_the_jobs_that_show_them() -> None:
    costs = daemon_costs([result_of(STORE, 0.1, 0.1, 0.02), result_of(LOAD, 0.1, 0.1, None)])
    measured = {cost.title: cost.measured for cost in costs}
    assert measured == {
        "warm open + close": None,
        "store cycle": pytest.approx(200.0),
        "load of 32 MiB blocks": None,
    }


def test_a_row_says_it_all() -> None:
    row = row_of(result_of(STORE, 0.1, 0.2, 0.02))
    assert row == (
        "store-4m-2t-buffered",
        "4.19 GB/s",
        "2.10 GB/s",
        "0.50",
        "0.50-0.50",
        "0.45",
        "200.0 us",
    )


def test_the_table_fits_80_columns() -> None:
    """With the longest job and the largest figures."""
    wide = Job(JobKind.STORE, 2, 17_989_632, Mode.BUFFERED)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(results_table([result_of(wide, 0.02, 0.02, 1.0)], "btrfs"))
    shown = [line.rstrip() for line in console.export_text().splitlines()]
    assert any(line.startswith(wide.name) and line.endswith("us") for line in shown)
    assert max(map(len, shown)) <= 80


def test_the_report_is_json_with_every_pair() -> None:
    report = json.loads(json.dumps(build_report([result_of(STORE, 0.1, 0.2, 0.02)], SETTING)))
    assert report["format"] == 1
    assert report["pairs"] == 2
    (job,) = report["jobs"]
    assert (job["name"], job["size_bytes"], job["mode"]) == (STORE.name, 4 * MIB, "buffered")
    assert job["ratio"]["pairs"] == [0.5, 0.5]
    assert (job["at_least"], job["aim"], job["met"]) == (0.45, 0.8, True)
    assert job["daemon_us_per_operation"]["median"] == 200.0
    assert [cost["measured"] for cost in report["daemon_costs"]] == [None, 200.0, None]


def test_the_picture_has_a_dot_a_pair_and_names_every_job() -> None:
    results = [result_of(STORE, 0.1, 0.2, None), result_of(LOAD, 0.1, 0.1, None)]
    root = ET.fromstring(plot(results, "a <b> & c"))
    tags = [element.tag.partition("}")[2] for element in root]
    texts = [element.text for element in root if element.text]
    assert tags.count("circle") == 4
    assert tags.count("polygon") == 2
    assert {STORE.name, LOAD.name} <= set(texts)
    assert any("a <b> & c" in text for text in texts)


def test_a_wild_pair_stays_inside_the_picture() -> None:
    root = ET.fromstring(plot([result_of(STORE, 1.0, 0.01, None)], "xfs"))
    width = float(root.attrib["width"])
    dots = [float(e.attrib["cx"]) for e in root if e.tag.endswith("circle")]
    assert dots
    assert all(x < width for x in dots)
    scale = [e.text for e in root if e.get("text-anchor") == "middle"]
    assert scale[-1] == "2.25", "and leaves the others their room"
