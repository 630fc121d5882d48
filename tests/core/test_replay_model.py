"""What a replay computes from what it counted: first tokens, percentiles, bytes written, facts."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from kvfs.bench.replay.first_token import Model
from kvfs.bench.replay.report import Round, build_report, facts_of, in_words, round_table
from kvfs.bench.replay.run import (
    Percentiles,
    ReplayCounts,
    ServedPrompt,
    SideResult,
    percentiles,
    written_bytes,
)
from kvfs.bench.replay.trace import Request, read_trace
from kvfs.machine.hardware import parse_written
from tests.support.store.trace import TRACE

#: One operation a parameter and token, no attention to speak of, a drive of a byte a second.
PLAIN = Model(10, 1, parameters=0.5, layers=1, width=1e-30, flops=1, drive_bytes_s=1)


def test_what_was_loaded_is_not_computed() -> None:
    assert PLAIN.prefill_s(100) == pytest.approx(100)
    assert PLAIN.prefill_s(100, 30) == pytest.approx(70)


def test_one_token_is_always_computed() -> None:
    assert PLAIN.prefill_s(100, 100) == pytest.approx(1)
    assert PLAIN.prefill_s(100, 512) == pytest.approx(1)


def test_attention_grows_with_the_square() -> None:
    model = PLAIN._replace(parameters=0, layers=3, width=5)
    assert model.prefill_s(100) == pytest.approx(2 * 3 * 5 * 100**2)
    assert model.prefill_s(100, 40) == pytest.approx(2 * 3 * 5 * (100**2 - 40**2))


def test_scaled_blocks_pay_for_the_bytes_they_lack() -> None:
    # 3 blocks stand for 10 bytes each, of which the replay's have 4; waiting was 0.5 s.
    assert PLAIN.first_token_s(100, 3, 0.5, 4) == pytest.approx(0.5 + 3 * 6 + 70)
    assert PLAIN.first_token_s(100, 3, 0.5, 99) == pytest.approx(0.5 + 70)
    assert PLAIN.first_token_s(100, 0, 0.5, 4) == pytest.approx(0.5 + 100)


def test_percentiles() -> None:
    assert percentiles([]) == (0, 0, 0)
    assert percentiles([7]) == (7, 7, 7)
    assert percentiles([*range(100, 0, -1)]) == (50, 100, 50.5)
    assert percentiles([*range(1, 1001)]).p99 == 991


def test_bytes_written_are_the_block_layers() -> None:
    # Of a drive of mine: 17 values since Linux 5.5; sectors written are the seventh.
    text = "  100 0 2048 10  200 5 4096 20 0 30 40 0 0 0 0 7 3\n"
    assert parse_written(text) == 4096 * 512
    assert parse_written("") is parse_written("1 2 3") is parse_written("a b c d e f g") is None


def test_what_lies_on_no_block_device_has_no_such_counter() -> None:
    assert written_bytes("/proc") is None
    assert written_bytes("/missing") is None


def test_the_facts_of_the_recorded_trace() -> None:
    facts = facts_of(read_trace(str(TRACE)), Model())
    assert (facts.requests, facts.blocks, facts.accesses) == (12_031, 182_790, 288_500)
    assert 100 * facts.best_hit_rate == pytest.approx(36.6, abs=0.05)
    assert 0 < facts.computed_s.p50 < facts.computed_s.p99


def test_the_facts_of_a_trace_without_reuse() -> None:
    facts = facts_of([Request(0, 5, (1, 2)), Request(0, 5, ()), Request(0, 5, (3, 2))], PLAIN)
    assert (facts.blocks, facts.accesses, facts.best_hit_rate) == (3, 4, 0)


def test_table_and_report_say_what_was_counted() -> None:
    tally = ReplayCounts(asked=8, hits=2, stored=5, refused=1, prompts=[ServedPrompt(5, 2, 3)])
    times = Percentiles(0.001, 0.002, 0.0015)
    side = SideResult("XFS, cleaned every 1 s", tally, times, times, times, None, 1, 2, 3, 4, 4)
    written = side._replace(name="kvfs, lru", written_bytes=5_000_000_000, halves_left=0)
    facts = facts_of([Request(0, 5, (1, 2))], PLAIN)
    each = Round(50, 65536, 65536, [side, written])
    report = build_report([each], facts, PLAIN, {"clients": 1})
    assert report["clients"] == 1
    assert report["rounds"][0]["blocks_share"] == 0.5
    first, second = report["rounds"][0]["sides"]
    assert (first["hit_rate"], first["refused"], first["deleted"]) == (0.25, 1, 3)
    assert (first["written_bytes"], second["written_bytes"]) == (None, 5_000_000_000)
    cells = [list(column.cells) for column in round_table(each, facts).columns]
    assert cells[1] == ["25.00 %", "25.00 %", "0 %"]
    assert cells[2][0] == "1000 us\n2000 us"
    assert cells[5][:2] == ["-", "5.00 GB"]


def test_what_a_round_comes_to_is_said_in_words() -> None:
    times = Percentiles(0.001, 0.002, 0.0015)
    poor = ReplayCounts(asked=1000, hits=200, stored=5, refused=1200, lost=3)
    good = ReplayCounts(asked=1000, hits=276, stored=9)
    xfs = SideResult("XFS, cleaned every 60 s", poor, times, times, times, None, 1, 2, 3, 4, 4)
    kvfs = SideResult("kvfs, lru", good, times, times, times, None, 1, 2, None, 4, 0)
    assert list(in_words(Round(5, 1 << 20, 1 << 30, [kvfs, xfs]))) == [
        "kvfs, lru: 27.6 % found, no store refused, no load lost, no half block of 4 killed "
        "writers.",
        "XFS, cleaned every 60 s: 20.0 % found (7.6 points below the best), 1,200 of 1,205 stores "
        "refused (ENOSPC), 3 loads lost: the block went after its lookup, 4 half blocks of 4 "
        "killed writers.",
    ]


def test_the_table_fits_80_columns() -> None:
    """Of the largest figures of a long run."""
    slow = Percentiles(0.00999, 12.3, 5)
    tally = ReplayCounts(asked=10**6, hits=10**6, refused=999_999, lost=99_999)
    names = ("kvfs, adaptive", "XFS, cleaned every 3600 s")
    sides = [
        SideResult(name, tally, slow, slow, slow, 999 * 10**9, 9999.9, 9999.9, 1, 1.0, 0)
        for name in names
    ]
    facts = facts_of([Request(0, 5, (1, 2))], PLAIN)._replace(blocks=10**7)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(round_table(Round(33.3, 1 << 20, 1 << 44, sides), facts))
    shown = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in shown) <= 80
    assert any("12300.0 ms" in line for line in shown)


def test_a_device_counts_what_its_file_system_writes(tmp_path: Path) -> None:
    before = written_bytes(str(tmp_path))
    if before is None:
        pytest.skip("temporary files lie on no block device")
    with open(tmp_path / "f", "wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    after = written_bytes(str(tmp_path))
    assert after is not None
    assert after >= before + (1 << 20)
