"""`kvfs simulate` of a recording: each block by itself, the mount's own size, and cut files."""

import gzip
import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.bench.simulate.loads import recording_at
from kvfs.cli.main import main
from kvfs.core.errors import TraceUnreadable, UsageError
from tests.support.store.trace import TRACE

HEADER: Final = {
    "kvfs_recording": 1,
    "name": "kv",
    "time": 1000.0,
    "every_s": 1.0,
    "capacity_bytes": 1 << 20,
    "for_blocks_bytes": 20_000,
}


def line(time: float, *blocks: int, **more: object) -> dict[str, Any]:
    """A line of blocks of 4000 bytes."""
    return {"time": time, "blocks": list(blocks), "bytes": 4000 * len(blocks), **more}


#: In a prompt none of these would be found, since each line has a block that is new before.
LINES: Final = (
    line(1001.0, 1, 2, 3, hits=0, misses=3),
    line(1002.0, 9, 1, 2, hits=5, misses=1),
    line(1001.5, hits=1, misses=1),
    line(1004.5, 8, 3, 9, hits=3, misses=1, lost=7, key_of_another_version=[]),
    line(1005.0, gap_s=2.5),
)


def text_of(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in lines)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "load.jsonl").write_text(text_of(HEADER, *LINES))
    return tmp_path / "load.jsonl"


def test_its_uses_are_requests_of_one_block(path: Path) -> None:
    found = recording_at(str(path))
    assert found is not None
    assert [request.blocks for request in found.requests] == [
        (block,) for block in (1, 2, 3, 9, 1, 2, 8, 3, 9)
    ]
    assert [request.at_s for request in found.requests] == [1.0] * 3 + [2.0] * 3 + [4.5] * 3
    assert found[1:] == (9, 1, 4000, 5, 9, 6, 7, 2.5)
    first = recording_at(str(path), 4)
    assert first is not None
    assert first.requests == found.requests[:4]
    assert first.block_bytes == 4000


def simulated(path: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["simulate", str(path), *flags, "--json", "-"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_each_block_counts_by_itself_also_in_a_pool_of_the_mounts_size(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(path, "--blocks-share", "20%,100%", capsys=capsys)
    own = {"uses": 9, "one_in": 1, "block_bytes": 4000, "room": 5, "hits": 9, "misses": 6}
    assert found["recording"] == own | {"lost": 7, "gaps_s": 2.5}
    assert (found["accesses"], found["blocks"]) == (9, 5)
    assert [pool["blocks"] for pool in found["pools"]] == [1, 5, 5]
    one, *whole = found["pools"]
    assert {name: each["hit_rate"] for name, each in one["policies"].items()}["lru"] == 0
    for pool in whole:
        for policy, each in pool["policies"].items():
            if policy != "gate":
                assert each["hit_rate"] == pytest.approx(4 / 9, abs=1e-6)
    assert simulated(TRACE, "--requests", "99", capsys=capsys)["recording"] is None


def test_the_table_says_what_was_counted(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(text_of({**HEADER, "for_blocks_bytes": 12_000}, *LINES))
    picture = tmp_path / "load.svg"
    assert main(["simulate", str(path), "--blocks-share", "20%", "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert all(len(each) <= 80 for each in lines)
    assert lines[:5] == [
        "load.jsonl: 9 uses of 5 blocks of 3.91 KiB in 4 s",
        "the mount has room for 3 blocks; it counted 9 hits and 6 misses",
        "7 uses more came too fast, and are not in it",
        "it lacks 2.5 s in which the server was replaced",
        "found / written, % of all uses",
    ]
    assert [each.split()[:4] for each in lines[7:9]] == [
        ["20", "%", "1", "0.0"],
        ["60", "%", "(now)", "3"],
    ]
    assert "prefix" not in printed.out + picture.read_text()
    assert "60 % (now)" in picture.read_text()


def skewed(uses: int, blocks: int) -> list[int]:
    """Blocks as Zipf's law has them used, with numbers by chance."""
    draw = random.Random(37)
    numbers = [draw.getrandbits(32) for _ in range(blocks)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(blocks)))
    return draw.choices(numbers, cum_weights=weights, k=uses)


def test_of_a_long_recording_a_sample_is_served(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds what all of it would, within some percent: a real one has 4,096 blocks or more."""
    used = skewed(40_000, 9_000)
    lines = [line(1000.0 + at, *used[at : at + 100]) for at in range(0, len(used), 100)]
    path.write_text(text_of({**HEADER, "for_blocks_bytes": 4_000_000}, *lines))
    flags = ("--policies", "lru,best", "--blocks-share", "20%")
    whole = simulated(path, *flags, capsys=capsys)
    monkeypatch.setattr("kvfs.bench.simulate.loads.SERVED_MAX", 11_000)
    monkeypatch.setattr("kvfs.bench.simulate.loads.SAMPLED_LEAST", 500)
    sample = simulated(path, *flags, capsys=capsys)
    assert (whole["recording"]["one_in"], sample["recording"]["one_in"]) == (1, 4)
    assert sample["accesses"] == whole["accesses"] == 40_000
    assert 0 < sample["requests"] <= 11_000
    assert sample["blocks"] == pytest.approx(whole["blocks"], rel=0.05)
    for one, other in zip(whole["pools"], sample["pools"], strict=True):
        assert other["blocks"] == pytest.approx(one["blocks"], rel=0.05)
        for policy, found in one["policies"].items():
            for rate in ("hit_rate", "written"):
                assert other["policies"][policy][rate] == pytest.approx(found[rate], abs=0.03)
    assert main(["simulate", str(path), *flags]) == 0
    assert "by a sample: one block in 4" in capsys.readouterr().out


def test_uses_of_few_blocks_are_all_served(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.bench.simulate.loads.SERVED_MAX", 10)
    lines = [line(1000.0 + at, at % 7, 1 << 31) for at in range(100)]
    path.write_text(text_of(HEADER, *lines))
    found = recording_at(str(path))
    assert found is not None
    assert (len(found.requests), found.uses, found.one_in) == (200, 200, 1)


def test_a_last_line_that_is_not_whole_counts_for_nothing(path: Path) -> None:
    whole = recording_at(str(path))
    text = path.read_text()
    last = len(json.dumps(LINES[-1])) + 1
    for cut in range(1, last):
        path.write_text(text[:-cut])
        found = recording_at(str(path))
        assert found is not None
        assert whole is not None
        assert found.requests == whole.requests
        assert found.gaps_s == (2.5 if cut == 1 else 0)
    path.write_bytes(gzip.compress(text.encode()))
    assert recording_at(str(path)) == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (text_of({**HEADER, "kvfs_recording": 2}, *LINES), "of format 2; this kvfs reads 1"),
        (text_of(HEADER), "no block was used"),
        (text_of(HEADER, line(1001.0), line(1002.0)), "no block was used"),
        (text_of(HEADER, *LINES) + "{\n" + text_of(*LINES), "line 7: not a line of JSON"),
        (text_of(HEADER) + "[]\n", "line 2: not a line of JSON"),
        (text_of(HEADER, {"time": 1.0}), "line 2: blocks is no list"),
        (text_of(HEADER, line(1001.0, -1)), "line 2: -1 is no number of a block"),
        (text_of(HEADER, line(1001.0, 1 << 32)), "is no number of a block"),
        (text_of(HEADER, {**LINES[0], "blocks": ["1"]}), "'1' is no number of a block"),
        (text_of(HEADER, {**LINES[0], "time": "now"}), "line 2: time is no number"),
        (text_of(HEADER, {**LINES[0], "time": 1e300}), "line 2: time is out of range"),
        (text_of(HEADER, {**LINES[0], "bytes": -1}), "line 2: bytes is out of range"),
        (text_of({**HEADER, "for_blocks_bytes": None}, *LINES), "line 1: for_blocks_bytes is no"),
        ("{" + text_of(*LINES), "line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_recording_says_why(
    text: str, said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(text)
    assert main(["simulate", str(path)]) == TraceUnreadable.exit_code
    (told,) = capsys.readouterr().err.splitlines()
    assert said in told


def test_what_wants_prompts_refuses_a_recording(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(path), "--hints", "90%"]) == UsageError.exit_code
    assert "--hints: a recording does not know" in capsys.readouterr().err
    for command in (
        ["replay", str(path), "--mount", "/kv", "--baseline", "/data"],
        ["size", "--trace", str(path), "--block", "4M"],
    ):
        assert main(command) == TraceUnreadable.exit_code
        (told,) = capsys.readouterr().err.splitlines()
        assert "line 1: a recording by `kvfs record`" in told
