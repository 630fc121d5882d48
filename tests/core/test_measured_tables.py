"""The measured tables are those of their runs, and a run that is older than its code says so."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.bench.jobs import Job, JobKind, JobRuns, Mode, Sample, Work, summarise
from kvfs.bench.output import build_report as bench_report
from kvfs.bench.replay.first_token import Model
from kvfs.bench.replay.report import Round, build_report, facts_of
from kvfs.bench.replay.run import Percentiles, ReplayCounts, SideResult
from kvfs.bench.replay.trace import Request
from kvfs.core.sizes import MIB
from make import measured_tables
from make.measured_tables import (
    COMMITS_MAX,
    TABLES,
    Run,
    commits_since,
    kept_of,
    made_pages,
    runs,
    with_table,
)
from tests.bench.first_token_report import rows
from tests.support.mounts.mounting import ROOT

RUNS: Final = {run.name: run for run in runs()}
EACH_RUN: Final = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
LIST: Final = (ROOT / "docs" / "dev" / "measuring.md").read_text()
#: A run, the code that it measures, and why it is still shown if it is old.
_ROW: Final = re.compile(r"^\| ([a-z0-9-]+) \|.*\| ((?:`[\w/.]+` ?)+) \| (.*?) ?\|$", re.MULTILINE)
LISTED: Final = {name: (re.findall(r"`(.+?)`", of), why) for name, of, why in _ROW.findall(LIST)}


def test_pages_have_what_was_measured() -> None:
    for page, text in made_pages().items():
        assert (ROOT / page).read_text() == text, "run `python -m make.measured_tables`"


def test_each_run_is_shown_and_listed() -> None:
    assert {table.run for table in TABLES} == set(RUNS)
    assert list(LISTED) == sorted(RUNS, key=lambda name: name)


@EACH_RUN
def test_the_head_of_a_run_is_whole(run: Run) -> None:
    assert re.fullmatch(r"[0-9a-f]{7,12}", run.commit), "of what was committed"
    assert run.machine
    assert LISTED[run.name][0] == list(run.measures)
    assert all((ROOT / path).exists() for path in run.measures)
    pages = {table.page for table in TABLES if table.run == run.name}
    assert any(run.commit in (ROOT / page).read_text() for page in pages)
    if module := re.search(r"-m tests\.bench\.(\w+)", run.command):
        assert (ROOT / "tests" / "bench" / f"{module[1]}.py").exists()
    else:
        assert run.command in (ROOT / "docs" / "performance.md").read_text()


@EACH_RUN
def test_what_is_older_than_its_code_says_so(run: Run) -> None:
    since = commits_since(run)
    if since is None:
        pytest.skip("the history of commits is not here")
    why = LISTED[run.name][1]
    assert why.startswith("old: ") == (since > COMMITS_MAX), f"{since} commits: {run.command}"


def test_another_table_or_none_is_noticed() -> None:
    table = next(one for one in TABLES if one.run == "replay" and one.page == "README.md")
    text = (ROOT / table.page).read_text()
    wrong = text.replace("| 7,575 |", "| 7,576 |")
    assert wrong != text
    assert with_table(wrong, table, RUNS["replay"].results) == text
    with pytest.raises(ValueError, match="no table"):
        with_table(text.replace(table.head, "| size"), table, RUNS["replay"].results)


def compared() -> dict[str, Any]:
    job = Job(JobKind.STORE, 2, 4 * MIB, Mode.BUFFERED)
    found = summarise(JobRuns(job, Work(50, 2, 1), [Sample(0.1, None)] * 2, [Sample(0.2, 0.1)] * 2))
    return {"rss_anon_bytes": 32 * MIB, **bench_report([found], {})}


def first_tokens() -> dict[str, Any]:
    places = [("recomputed", "none")]
    places += [(p, c) for p in ("XFS", "kvfs", "kvfs, restarted") for c in ("cold", "warm")]
    sample = {"tokens": 2048, "bytes": 64 * MIB, "load_s": 0.01, "same_token": True}
    each = [
        sample | {"place": place, "cache": cache, "first_token_s": 1.25} for place, cache in places
    ]
    return {"rows": rows(each), "samples": each}


def replayed() -> dict[str, Any]:
    times = Percentiles(0.001, 0.002, 0.0015)
    tally = ReplayCounts(asked=8, hits=2, stored=5, refused=1200)
    side = SideResult("kvfs, lru", tally, times, times, times, None, 1, 2, None, 4, 0)
    model = Model(10, 1, parameters=0.5, layers=1, width=1e-30, flops=1, drive_bytes_s=1)
    facts = facts_of([Request(0, 5, (1, 2))], model)
    return build_report([Round(5, 1 << 20, 1 << 30, [side])], facts, model, {})


def filled() -> dict[str, Any]:
    one = {"rate_bytes_s": 4.4e9, "p50_us": 1749.2, "p99_us": 3605.0, "refused": 0}
    return {
        "full_to_xfs_rate": 0.5,
        "sides": {"kvfs, full": [one, one]},
        "refused": {"kvfs, full": 0},
    }


PRINTED: Final = {
    "compare": (compared, "| store-4m-2t-buffered | 8.39 GB/s | 4.19 GB/s | 0.50 | 0.50 - 0.50 | "),
    "first-token": (first_tokens, "| 2,048 | 64 MiB | 1,250 (1,250) | 1,250 (1,250) |"),
    "full-4m": (filled, "| kvfs, full | 4.40 GB/s | 1749 us | 3605 us | 0 |"),
    "replay": (
        replayed,
        "| 5 % | kvfs, lru | 25.0 % | 1,000 / 2,000 | 1,000 / 2,000 | 0.002 s | -",
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_a_bench_prints_is_taken_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, row = PRINTED[name]
    monkeypatch.setattr(measured_tables, "PLACE", tmp_path)
    told = RUNS[name]._asdict()
    del told["name"]
    (tmp_path / f"{name}.json").write_text(json.dumps(told))
    (tmp_path / "output").write_text(json.dumps(printed()))
    measured_tables.keep(name, tmp_path / "output")
    kept = measured_tables.read_run(name)
    assert kept.command == RUNS[name].command
    assert kept.commit != RUNS[name].commit
    table = next(one for one in TABLES if one.run == name)
    page = with_table((ROOT / table.page).read_text(), table, kept.results)
    assert row in page


def test_single_samples_are_not_kept() -> None:
    assert "samples" not in kept_of(first_tokens())
    (job,) = kept_of(compared())["jobs"]
    assert "pairs" not in job["ratio"]
