"""`kvfs simulate`: known figures of the recorded trace, hard workloads, one line for mistakes."""

import json
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.bench.replay.trace import Request
from kvfs.bench.simulate.found import best_possible
from kvfs.bench.simulate.loads import SYNTHETIC, hints_of, shuffled
from kvfs.cli import simulate
from kvfs.cli.main import main
from kvfs.core.admission import Hint
from kvfs.core.errors import TraceUnreadable, UsageError
from tests.support.rules.documented import of
from tests.support.store.trace import TRACE

SVG: Final = "{http://www.w3.org/2000/svg}"


def simulated(*flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what the command prints as JSON."""
    assert main(["simulate", *flags, "--json", "-"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def outcomes(*flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[float, float]]:
    """Return hits and writes in percent by policy, of one size."""
    (pool,) = simulated(*flags, capsys=capsys)["pools"]
    return {
        name: (100 * one["hit_rate"], 100 * one["written"])
        for name, one in pool["policies"].items()
    }


#: Pool in percent: hits and writes of the trace, within how much.
KNOWN: Final = {
    2: {"lru": (7.9, 92), "arc": (9.0, 91), "gate": (14.5, 15), "best": (31.4, 14)},
    10: {"arc": (28.4, 72), "gate": (28.6, 47)},
}


@pytest.mark.parametrize("percent", KNOWN)
def test_the_recorded_trace(percent: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (str(TRACE), "--blocks-share", f"{percent}%")
    found = outcomes(*flags, "--policies", ",".join(KNOWN[percent]), capsys=capsys)
    for name, (hits, written) in KNOWN[percent].items():
        assert found[name][0] == pytest.approx(hits, abs=0.1), name
        assert found[name][1] == pytest.approx(written, abs=1), name


@pytest.mark.parametrize("workload", SYNTHETIC)
def test_the_gate_is_no_worse_than_lru_where_caches_fail(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--synthetic", workload, "--policies", "lru,gate,best")
    for pool in simulated(*flags, "--blocks-share", "5%,90%", capsys=capsys)["pools"]:
        lru, gate, best = (pool["policies"][name] for name in ("lru", "gate", "best"))
        assert gate["hit_rate"] >= lru["hit_rate"] - 0.01
        assert gate["written"] <= lru["written"]
        assert best["hit_rate"] >= max(lru["hit_rate"], gate["hit_rate"])


def test_the_gate_is_no_worse_where_there_is_no_order(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (str(TRACE), "--shuffle", "--requests", "4000", "--blocks-share", "5%")
    found = outcomes(*flags, "--policies", "lru,gate", capsys=capsys)
    assert found["gate"][0] >= found["lru"][0]
    assert found["gate"][1] < found["lru"][1]


def test_a_budget_of_writes_gives_up_hits_for_days(capsys: pytest.CaptureFixture[str]) -> None:
    """A block counts as 2 GiB: the load would write many times its part."""
    flags = ("--synthetic", "drift", "--blocks-share", "10%", "--policies", "gate")
    flags += ("--block-size", "2G", "--endurance", "7P", "--write-budget", "none,1000P,50T,5T")
    (pool,) = simulated(*flags, capsys=capsys)["pools"]
    none, ample, some, little = pool["write_budgets"]
    gate = pool["policies"]["gate"]
    assert [one["a_day_bytes"] for one in pool["write_budgets"]] == [
        0,
        1000 << 50,
        50 << 40,
        5 << 40,
    ]
    for one in (none, ample):
        assert (one["hit_rate"], one["written"]) == (gate["hit_rate"], gate["written"])
    assert none["written"] > some["written"] > little["written"] > 0
    assert none["hit_rate"] > little["hit_rate"] > 0
    assert none["lasts_days"] < some["lasts_days"] < little["lasts_days"]
    for one in pool["write_budgets"]:
        days = (7 << 50) / one["written_a_day_bytes"]
        assert one["lasts_days"] == pytest.approx(days, rel=0.01, abs=0.06)


def test_what_a_budget_leaves_is_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--synthetic", "loop", "--requests", "200", "--blocks-share", "5%,50%")
    flags += ("--policies", "gate", "--write-budget", "none,1T", "--block-size", "64M")
    assert main(["simulate", *flags]) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    rows = [line.split() for line in printed.split("how many days")[1].splitlines()[3:]]
    assert [row[2] for row in rows] == ["none", "1", "none", "1"]
    assert {row[-1] for row in rows} == {"-"}, "how much the drive takes was not told"


def test_a_tier_behind_adds_what_was_evicted(capsys: pytest.CaptureFixture[str]) -> None:
    """With all that was ever stored, both find what a pool without bounds finds."""
    flags = ("--synthetic", "scan", "--policies", "lru,best")
    whole, small = simulated(*flags, "--blocks-share", "100%,2%", capsys=capsys)["pools"]
    unbounded, lru = whole["policies"]["lru"], small["policies"]["lru"]
    assert set(unbounded["tier_behind"].values()) == {0}
    assert unbounded["evicted"] == 0
    gains = list(lru["tier_behind"].values())
    assert gains == sorted(gains)
    assert 0 < gains[0] < gains[-1]
    assert lru["hit_rate"] + gains[-1] == pytest.approx(unbounded["hit_rate"], abs=1e-5)
    assert 0 < lru["written"] - lru["evicted"] < 0.02  # what the pool still holds
    assert small["policies"]["best"]["tier_behind"] == {}


def test_a_hint_finds_more_and_writes_less(capsys: pytest.CaptureFixture[str]) -> None:
    """About half-way from LRU to the best possible, nine of ten hints being right."""
    flags = (str(TRACE), "--blocks-share", "5%,10%", "--policies", "gate", "--hints", "90%")
    pools = simulated(*flags, capsys=capsys)["pools"]
    for pool, (lru, best) in zip(pools, ((19.6, 36.6), (27.9, 36.6)), strict=True):
        assert 100 * pool["policies"]["gate"]["hit_rate"] >= (lru + best) / 2 - 0.5
        assert pool["policies"]["gate"]["written"] <= 0.26


def test_hints_are_right_as_often_as_is_said() -> None:
    requests = [Request(0.0, 1, (number % 7, number)) for number in range(1000)]
    true = hints_of(requests, 1.0)
    assert true == [Hint.GOES_ON] * 993 + [Hint.ONCE] * 7
    wrong = sum(one is not other for one, other in zip(true, hints_of(requests, 0.9), strict=True))
    assert 70 < wrong < 130


def test_the_best_pool_knows_the_future() -> None:
    """Of two blocks one fits: the one that is asked for soonest, and nothing else is written."""
    asked = [(1,), (2,), (3,), (1,), (2,), (1,), (4,)]
    requests = [Request(float(at), 1, blocks) for at, blocks in enumerate(asked)]
    assert best_possible(requests, 1)[:2] == pytest.approx((200 / 7, 100 / 7))
    assert best_possible(requests, 2)[:2] == pytest.approx((300 / 7, 200 / 7))


def test_a_head_stays_before_its_tail() -> None:
    requests = [Request(float(at), 2, (1, 2)) for at in range(3)]
    assert best_possible(requests, 1)[:2] == pytest.approx((200 / 6, 100 / 6))


def test_what_is_made_by_rule_is_the_same_each_time() -> None:
    for make in SYNTHETIC.values():
        assert make() == make()
        assert shuffled(make()) == shuffled(make())
    requests = SYNTHETIC["scan"]()
    assert sorted(one.blocks for one in shuffled(requests)) == sorted(
        one.blocks for one in requests
    )
    assert [one.at_s for one in shuffled(requests)] == [one.at_s for one in requests]


def test_the_workloads_that_a_flag_names_are_those_there_are() -> None:
    assert tuple(SYNTHETIC) == simulate.MADE


def test_a_table_for_a_reader_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, report = tmp_path / "simulate.svg", tmp_path / "simulate.json"
    flags = [str(TRACE), "--requests", "300", "--plot", str(picture), "--json", str(report)]
    assert main(["simulate", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert "300 requests" in printed.out
    told = json.loads(report.read_text())
    tables = printed.out.split("A tier behind")
    for pool in told["pools"]:
        row, behind = (
            next(
                line for line in table.splitlines() if line.split()[2:3] == [f"{pool['blocks']:,}"]
            )
            for table in tables
        )
        gains = [100 * gain for gain in pool["policies"]["lru"]["tier_behind"].values()]
        assert list(map(float, behind.split()[-6:-1])) == pytest.approx(gains, abs=0.06)
        for one in pool["policies"].values():
            assert f"{100 * one['hit_rate']:.1f} / {100 * one['written']:.0f}" in row
    root = ET.fromstring(picture.read_text())
    names = {text.text for text in root.iter(f"{SVG}text")}
    assert set(told["pools"][0]["policies"]) < names
    assert len(list(root.iter(f"{SVG}polyline"))) == 2 * len(told["pools"][0]["policies"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "give TRACE or --synthetic"),
        ((str(TRACE), "--synthetic", "loop"), "give TRACE or --synthetic"),
        (("--synthetic", "lop"), "did you mean 'loop'"),
        (("--synthetic", "loop", "--policies", "fifo"), "'fifo' is none of lru, arc, adaptive"),
        (("--synthetic", "loop", "--policies", ","), "--policies: give at least one"),
        (("--synthetic", "loop", "--blocks-share", "0"), "greater than 0"),
        (("--synthetic", "loop", "--blocks-share", "101%"), "at most 100 %"),
        (("--synthetic", "loop", "--blocks-share", ","), "give at least one"),
        (("--synthetic", "loop", "--hints", "most"), "--hints: 'most' is not a number"),
        (("--synthetic", "loop", "--requests", "0"), "--requests"),
        (("--synthetic", "loop", "--write-budget", "1T"), "give --block-size, too"),
        (("--synthetic", "loop", "--write-budget", ","), "--write-budget: give at least one"),
        (("--synthetic", "loop", "--write-budget", "much"), "--write-budget: 'much' is not a size"),
        (("--synthetic", "loop", "--block-size", "1M"), "are for --write-budget"),
        (
            ("--synthetic", "loop", "--write-budget", "1T", "--policies", "lru"),
            "gate alone has one",
        ),
        (("--synthetic", "loop", "--json", "/missing/x"), "/missing/x: No such file"),
        (("--synthetic", "loop", "--plot", "/missing/x"), "/missing/x: No such file"),
    ],
)
def test_flags_that_do_not_fit(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags]) == UsageError.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("kvfs: ")
    assert said in line


def test_a_trace_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_text("0 5 1\nnot this\n")
    for name, said in (("none", "No such file"), ("trace", "line 2: not a request")):
        assert main(["simulate", str(tmp_path / name)]) == TraceUnreadable.exit_code
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.parametrize("command", of("docs/simulate.md", "kvfs simulate "))
def test_the_commands_of_the_page(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a part of the trace, which is served in seconds."""
    _, *words = shlex.split(command, comments=True)
    words = [str(TRACE) if word.endswith((".gz", ".jsonl")) else word for word in words]
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--requests", "200"]) == 0
    assert "written" in capsys.readouterr().out
