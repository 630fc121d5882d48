"""Standard streams and settings files as a caller may leave them: closed, full, a pipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.cli.failures import HUNG_UP_EXIT
from kvfs.client.user_file import read_file
from kvfs.core import errors
from kvfs.core.errors import CommandError, UsageError
from tests.support.mounts.mounting import KVFS, ROOT, run_kvfs


def shell(command: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run kvfs from a shell, where *command* says "$@"."""
    return subprocess.run(
        ["sh", "-c", command, "sh", *KVFS, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [("mount", "--print-settings"), ("--version",), ("mkfs", "--help"), ("bench", "jobs")],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_output_is_one_line(
    arguments: tuple[str, ...], unbuffered: str, tmp_path: Path
) -> None:
    environment = {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": unbuffered}
    done = shell('"$@" >/dev/full', *arguments, **environment)
    assert done.returncode == CommandError.exit_code
    assert done.stderr == "kvfs: cannot write the output: No space left on device\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [("mount", "--print-settings"), ("--version",)])
def test_a_closed_terminal_is_one_before_its_signal_comes(arguments: tuple[str, ...]) -> None:
    """Which this process never gets: the terminal is not that of its session."""
    master, terminal = os.openpty()
    os.close(master)
    done = subprocess.run(
        [*KVFS, *arguments],
        cwd=ROOT,
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(terminal)
    assert (done.returncode, done.stderr) == (HUNG_UP_EXIT, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_and_full_streams_change_no_exit_code(closed: str, tmp_path: Path) -> None:
    assert shell(f'"$@" {closed}', "mount", "--print-settings").returncode == 0
    assert shell(f'"$@" {closed}', "--version").returncode == 0
    done = shell(f'"$@" {closed}', "status", str(tmp_path))
    assert done.returncode == errors.NotMounted.exit_code
    if "2>" not in closed:
        assert done.stderr == f"kvfs: no kvfs is mounted at {tmp_path}\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_error_ends_no_bench(unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    places = ("--mount", str(tmp_path / "a"), "--baseline", str(tmp_path / "b"))
    flags = ("--quick", "--data", "2M", "--pairs", "1", "--jobs", "stat-hit-1t", "--json", "-")
    arguments = ("bench", "compare", *places, *flags)
    done = shell('"$@" 2>/dev/full', *arguments, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 0
    assert [job["name"] for job in json.loads(done.stdout)["jobs"]] == ["stat-hit-1t"]


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_name_that_cannot_be_printed_is_escaped(encoding: str, tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"caf\xc3\xa9-\xff")
    directory.mkdir()
    done = shell('"$@" 2>&1', "status", str(directory), PYTHONIOENCODING=encoding)
    assert done.returncode == errors.NotMounted.exit_code
    assert done.stdout.endswith("-\\xff\n")
    program = (
        "import sys; from kvfs.cli import main as m; m._dispatch = print; m.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, str(directory)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert rb"-\udcff" in printed.stdout or rb"-\\udcff" in printed.stdout


def test_a_pipe_in_place_of_settings_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever opens a pipe waits for a writer, and here none comes."""
    pipe = tmp_path / "kv.toml"
    os.mkfifo(pipe)
    for flags in (("mount", "--print-settings"), ("umount",)):
        done = run_kvfs(*flags, "--config", str(pipe), check=False)
        assert done.returncode == UsageError.exit_code
        assert done.stderr == f"kvfs: settings file {pipe}: is not a regular file\n"
    with pytest.raises(OSError, match="is not a regular file"):
        read_file("/dev/zero")


def test_settings_may_come_from_the_shell() -> None:
    arguments = ("mount", "--print-settings", "--config", "/dev/stdin")
    settings = 'source="/a"\nmountpoint="/b"\nlease_s=17'
    for given in (f"echo '{settings}' | \"$@\"", f"\"$@\" <<'.'\n{settings}\n.\n"):
        shown = shell(given, *arguments)
        assert shown.returncode == 0, shown.stderr
        assert "17.0 s" in shown.stdout
    done = run_kvfs("umount", "--config", os.devnull, check=False)
    assert done.stderr.endswith("does not set mountpoint\n")
