"""Request traces: both formats, and one line for each way in which a file is no trace."""

import gzip
import json
from pathlib import Path

import pytest

from kvfs.bench.replay.trace import Request, footprint, parse_line, read_trace
from kvfs.core.errors import TraceUnreadable
from tests.support.store.trace import TRACE

MOONCAKE = {"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 2354]}


def test_mooncakes_lines_and_plain_words_say_the_same() -> None:
    wanted = Request(27.482, 955, (46, 2354))
    assert parse_line(json.dumps(MOONCAKE)) == wanted
    assert parse_line("27482 955 46 2354\n") == wanted


def test_runs_and_hashes_are_blocks() -> None:
    request = parse_line("0 99 7+3 5e1f 12+ 5e1f")
    assert request is not None
    assert request.blocks[:3] == (7, 8, 9)
    first, odd, again = request.blocks[3:]
    assert first == again != odd
    assert parse_line(json.dumps({**MOONCAKE, "hash_ids": ["5e1f"]})) == Request(
        27.482, 955, (first,)
    )


@pytest.mark.parametrize("line", ["", "  \n", "# MILLISECONDS TOKENS BLOCK"])
def test_comments_and_empty_lines_count_for_nothing(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("soon 5 1", "not a request"),
        ("17", "not a request"),
        ("-1 5 1", "the time"),
        ("nan 5 1", "the time"),
        ("0 -5 1", "tokens"),
        (f"0 5 {1 << 64}", "2^64"),
        ("0 5 0+9999999999", "more than"),
        ("0 5 0+1048577", "more than 1048576 blocks"),
        ("{", "not JSON"),
        ('{"timestamp": 0, "hash_ids": []}', "no input_length"),
        (json.dumps({**MOONCAKE, "timestamp": "now"}), "must be numbers"),
        (json.dumps({**MOONCAKE, "input_length": True}), "must be numbers"),
        (json.dumps({**MOONCAKE, "hash_ids": 7}), "a list"),
        (json.dumps({**MOONCAKE, "hash_ids": [None]}), "a number or a text"),
        (json.dumps({**MOONCAKE, "hash_ids": [-1]}), "0 or more"),
    ],
)
def test_a_line_that_is_no_request_says_why(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("^", r"\^")):
        parse_line(line)


def test_the_line_at_fault_is_named(tmp_path: Path) -> None:
    for text, fault in {
        "# head\n0 5 1\nrubbish\n": "line 3: not a request",
        "9 5 1\n\n8 5 1\n": "line 3: earlier than the request before",
    }.items():
        (tmp_path / "t").write_text(text)
        with pytest.raises(TraceUnreadable, match=fault):
            read_trace(str(tmp_path / "t"))


def test_what_is_no_trace_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(TraceUnreadable, match="No such file"):
        read_trace(str(path))
    with pytest.raises(TraceUnreadable, match="Is a directory"):
        read_trace(str(tmp_path))
    for content in (b"", b"# only words\n", b"0 5\n"):
        path.write_bytes(content)
        with pytest.raises(TraceUnreadable, match="no request in it asks for a block"):
            read_trace(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceUnreadable, match="line 1: "):
        read_trace(str(path))
    packed = gzip.compress(b"0 5 1\n" * 999)
    for cut in (packed[: len(packed) // 2], packed[:12] + b"\xff" * 9 + packed[21:]):
        path.write_bytes(cut)
        with pytest.raises(TraceUnreadable, match="damaged gzip"):
            read_trace(str(path))


def test_a_packed_trace_is_read_and_a_slice_ends_early(tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_bytes(gzip.compress(b"0 5 1\n5 5 1 2\nrubbish"))
    first = Request(0, 5, (1,))
    assert read_trace(str(tmp_path / "t.gz"), 1) == [first]
    found = read_trace(str(tmp_path / "t.gz"), 2)
    assert found == [first, Request(0.005, 5, (1, 2))]
    assert footprint(found) == 2


def test_each_prompt_of_the_recorded_trace_fills_its_blocks() -> None:
    for request in read_trace(str(TRACE)):
        assert len(request.blocks) == -(-request.tokens // 512)
