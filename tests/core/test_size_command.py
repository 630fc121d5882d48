"""``kvfs size``: figures of the pages that measured them, one line for what it cannot compute."""

import json
import shlex
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.cli.main import main
from kvfs.core import load_needs
from kvfs.core.errors import TraceUnreadable, UsageError
from kvfs.core.headroom import Headroom
from kvfs.core.load_needs import BLOCKS_FEW, Measured
from kvfs.core.sizes import DAY_S, GIB, MIB
from tests.support.mounts.mounting import ROOT
from tests.support.rules.documented import of

MEASURED: Final = [found for found in vars(load_needs).values() if isinstance(found, Measured)]
TRACE: Final = str(ROOT / "tests" / "traces" / "conversation.trace.gz")
#: 200 stores a second of 4 MiB, for a day.
STATED: Final = ("--block", "4M", "--stores", "200", "--keep", "24h")


def size(*flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what the command prints as JSON."""
    assert main(["size", *flags, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.mark.parametrize("found", [*MEASURED, *(found for _, found in load_needs.WRITTEN)])
def test_a_figure_is_that_of_the_page_that_measured_it(found: Measured) -> None:
    assert found.words in (ROOT / "docs" / found.document).read_text()
    scales = (1, 1e3, 1e6, 1 / 1024, 1 / MIB)
    shown = {f"{found.value * scale:.15g}" for scale in scales}
    shown |= {f"{found.value * scale:,.0f}" for scale in scales}
    assert any(one in found.words for one in shown), shown


def test_what_a_load_needs_follows(capsys: pytest.CaptureFixture[str]) -> None:
    told = size(*STATED, "--endurance", "7P", "--loads", "1000", capsys=capsys)
    needs = told["needs"]
    assert needs["blocks"] == 200 * DAY_S
    assert needs["blocks_bytes"] == needs["blocks"] * 4 * MIB
    headroom = Headroom(needs["capacity_bytes"]).bytes_at(800 * MIB)
    ready = 100 * 4 * MIB  # for half a second
    assert needs["capacity_bytes"] == needs["blocks_bytes"] + headroom + ready
    assert needs["device_bytes"] > needs["capacity_bytes"] + needs["log_bytes"]
    assert needs["index_memory_bytes"] == needs["blocks"] * 550 + 16 * MIB
    assert needs["store_cores"] == pytest.approx(200 * 461e-6)
    assert needs["load_cores"] == pytest.approx(1000 * 4 * MIB / 1e9 * 9.1e-3)
    assert needs["life_days"] == pytest.approx((7 << 50) / (800 * MIB * 1.0007 * DAY_S))
    assert told["warnings"] == []


def test_the_time_follows_from_the_capacity_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    there = size(*STATED, capsys=capsys)["needs"]
    capacity = ("--capacity", str(there["capacity_bytes"]))
    back = size("--block", "4M", "--rate", "800M", *capacity, capsys=capsys)["needs"]
    assert back["keep_s"] == pytest.approx(DAY_S)
    assert back["blocks"] == there["blocks"]


def test_the_drive_of_the_page_lasts_as_long(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/sizing.md: 7.0 PB last 81 days at 1 GB/s."""
    flags = ("--block", "4M", "--rate", "1000000000", "--keep", "1h", "--endurance")
    needs = size(*flags, str(int(7.0e15)), capsys=capsys)["needs"]
    assert round(needs["life_days"]) == 81


def test_small_blocks_have_more_names_than_a_file_system_keeps_room_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large, small = (
        size("--block", block, "--rate", "100M", "--capacity", "1T", capsys=capsys)["needs"]
        for block in ("4M", "64K")
    )
    assert small["device_bytes"] > large["device_bytes"] + 16 * GIB
    assert small["memory_bytes"] > large["memory_bytes"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--block", "4M", "--stores", "1", "--keep", "60s"), f"room for some {BLOCKS_FEW}"),
        (("--block", "4K", "--stores", "5000", "--keep", "60s"), "one event loop, and this is 2.3"),
        (("--block", "4K", "--stores", "100", "--keep", "60s"), "below 64 KiB are not measured"),
        (("--block", "64K", "--stores", "1000", "--keep", "52w"), "raise index_map_bytes"),
    ],
)
def test_what_stands_against_it_is_said(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *flags]) == 0
    printed = capsys.readouterr()
    assert words in printed.err
    assert all(line.startswith("kvfs: ") for line in printed.err.splitlines())
    assert any(words in line for line in size(*flags, capsys=capsys)["warnings"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "required: --block"),
        (("--block", "4M"), "give --stores or --rate, or --trace"),
        (("--block", "4M", "--stores", "1", "--rate", "1G"), "give --stores or --rate"),
        (("--block", "4M", "--stores", "1"), "give --keep or --capacity"),
        (("--block", "4M", "--stores", "x", "--keep", "1h"), "--stores: 'x' is not a number"),
        (("--block", "4M", "--stores", "-1", "--keep", "1h"), "--stores: '-1' is not a number"),
        (("--block", "4M", "--stores", "0", "--keep", "1h"), "0 stores a second"),
        (("--block", "4M", "--stores", "1000001", "--keep", "1h"), "--stores: '1000001'"),
        (("--block", "4M", "--stores", "nan", "--keep", "1h"), "--stores: 'nan'"),
        (("--block", "1", "--rate", "1T", "--keep", "1h"), "1.09951e+12 stores a second"),
        (("--block", "4M", "--stores", "1", "--keep", "24"), "--keep: '24' is not an age"),
        (("--block", "4M", "--stores", "1", "--keep", "0h"), "--keep must be greater than 0"),
        (("--block", "0", "--stores", "1", "--keep", "1h"), "--block must be greater than 0"),
        (("--block", "4M", "--stores", "1", "--capacity", "4M"), "at least two blocks"),
        (("--block", "4M", "--stores", "1", "--keep", "1h", "--find", "50"), "--find needs"),
        (("--block", "4M", "--trace", TRACE, "--stores", "1"), "leave out --stores"),
        (("--block", "4M", "--trace", TRACE, "--find", "0"), "--find: '0' is not a number"),
        (("--block", "4M", "--trace", TRACE, "--find", "9", "--capacity", "1G"), "not both"),
    ],
)
def test_what_it_cannot_compute_is_one_line(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *flags]) == UsageError.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_trace_that_is_none_has_a_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "once").write_text("0 100 1 2 3\n0 100 1 2 3\n")
    for name, said in (("none", "No such file"), ("once", "came at one moment")):
        code = main(["size", "--block", "4M", "--trace", str(tmp_path / name)])
        assert code == TraceUnreadable.exit_code
        assert said in capsys.readouterr().err


def test_what_is_found_of_the_recorded_hour_is_what_the_page_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """docs/eviction.md has it from the policy itself; here it follows from reuse distances."""
    told = size("--block", "32M", "--trace", TRACE, capsys=capsys)
    rates = {one["blocks"]: one["hit_rate"] for one in told["trace"]["found"]}
    blocks = told["trace"]["blocks"]
    page = (ROOT / "docs" / "eviction.md").read_text()
    for percent in (1, 5, 10, 20):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {percent} % | ")]
        measured_rate = float(row.split("|")[2].split("/")[0]) / 100
        assert rates[round(blocks * percent / 100)] == pytest.approx(measured_rate, abs=0.002)
    assert f"{100 * told['trace']['best']:.1f} %" in page
    assert told["needs"]["blocks"] == round(blocks * 0.2), "the least that finds 90 % of it"
    less = size("--block", "32M", "--trace", TRACE, "--find", "50%", capsys=capsys)
    assert less["needs"]["blocks"] == round(blocks * 0.05)
    assert less["load"]["loads_s"] < told["load"]["loads_s"]


@pytest.mark.parametrize("command", of("docs/sizing.md", "kvfs size "))
def test_the_commands_of_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(command, comments=True)
    words = [TRACE if word.endswith(".gz") else word for word in words]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    if "--json" in words:
        assert json.loads(printed.out)["needs"]["capacity_bytes"] > 0
    else:
        assert "CPU of the server, in cores" in printed.out
        assert all(len(line) <= 100 for line in printed.out.splitlines())
