"""`kvfs replay` with flags and files that do not fit: one line, and a code for each kind."""

import os
from pathlib import Path

import pytest

from kvfs.cli.main import main
from kvfs.core.errors import NotMounted, TraceUnreadable, UsageError

MADE = ["--self-contained"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A trace of one prompt."""
    (tmp_path / "trace").write_text("0 100 1 2 3\n")
    return str(tmp_path / "trace")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that was printed."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("kvfs: ")
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "--self-contained"),
        (["--mount", "/"], "--baseline DIR"),
        ([*MADE, "--mount", "/"], "leave out"),
        (["--mount", "/", "--baseline", "/tmp", "--eviction", "arc"], "need --self-contained"),
        (["--mount", "/x", "--baseline", "/tmp"], "/x is not a directory"),
        (["--mount", "/", "--baseline", "/", "--cleaner-interval", "1,60"], "takes several"),
        (
            ["--mount", "/", "--baseline", "/", "--block-size", "1M", "--blocks-share", "5%"],
            "the other one follows",
        ),
        ([*MADE, "--blocks-share", "much"], "'much' is not a number"),
        ([*MADE, "--blocks-share", "101%"], "at most 100 %"),
        ([*MADE, "--blocks-share", ","], "at least one"),
        ([*MADE, "--blocks-share", "99%"], "room for 2 blocks is too small"),
        ([*MADE, "--block-size", "4K"], "sidecars below 64 KiB"),
        ([*MADE, "--block-size", "vast"], "--block-size: 'vast' is not a size"),
        ([*MADE, "--eviction", "fifo"], "'fifo' is none of lru, arc, adaptive"),
        ([*MADE, "--cleaner-interval", "0"], "greater than 0"),
        ([*MADE, "--cleaner-interval", ""], "--cleaner-interval"),
        ([*MADE, "--cleaner-high", "50%", "--cleaner-low", "60"], "below --cleaner-high"),
        ([*MADE, "--speed", "fast"], "--speed: 'fast' is not a number"),
        ([*MADE, "--clients", "0"], "--clients"),
        ([*MADE, "--requests", "0"], "--requests"),
        ([*MADE, "--flops", "0"], "parameters of the model"),
        ([*MADE, "--json", "/missing/x"], "/missing/x: No such file"),
    ],
)
def test_flags_that_do_not_fit(
    trace: str, flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("--self-contained needs root")
    assert main(["replay", trace, *flags]) == UsageError.exit_code
    assert line in said(capsys)


def test_a_trace_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    for content, line in {
        None: "No such file",
        "": "no request in it asks for a block",
        "0 5 1\nnot this\n": "line 2: not a request",
    }.items():
        if content is not None:
            path.write_text(content)
        assert main(["replay", str(path), *MADE]) == TraceUnreadable.exit_code
        assert f"{path}" in (shown := said(capsys))
        assert line in shown


def test_a_mount_that_is_none(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--mount", str(tmp_path), "--baseline", "/tmp"]
    assert main(["replay", trace, *flags]) == NotMounted.exit_code
    assert f"{tmp_path} is not on a kvfs mount" in said(capsys)


def test_devices_that_do_not_fit_into_memory(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("--self-contained needs root")
    Path(trace).write_text("0 5 0+100\n")
    flags = [*MADE, "--block-size", "100G", "--blocks-share", "50%"]
    assert main(["replay", trace, *flags]) == UsageError.exit_code
    assert "choose a smaller --block-size" in said(capsys)
