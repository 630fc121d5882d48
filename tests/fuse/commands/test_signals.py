"""Ctrl-C before a command is loaded, and a terminal that is closed under it."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.cli.failures import HUNG_UP_EXIT, INTERRUPTED_EXIT
from kvfs.core.errors import NotMounted
from tests.support.clients.terminal import OnTerminal, left_in, seen
from tests.support.mounts.mounting import COMMAND_WAIT_S, KVFS, ROOT, skip_without_mounts, workplace

#: Runs ``kvfs status /none`` as the installed program does, with a Ctrl-C at its Nth import, and
#: says how many there were.
INTERRUPTED: Final = """
import os, signal, sys

class CtrlC:
    def __init__(self, at):
        self.at, self.seen = at, 0
    def find_spec(self, name, path=None, target=None):
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGINT)

ctrl_c = CtrlC(int(sys.argv[1]))
from kvfs.cli.program import kvfs
sys.meta_path.insert(0, ctrl_c)
sys.argv[1:] = ["status", "/none"]
code = kvfs()
print(ctrl_c.seen)
sys.exit(code)
"""
#: Without *at* nothing is interrupted.
NEVER: Final = 0
#: Every so many imports; all of them would take half a minute.
STEP: Final = 9


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """A directory for what a command makes, and the one that TMPDIR names."""
    with workplace("disk") as place:
        made, temporary = place / "made", place / "temporary"
        made.mkdir()
        temporary.mkdir()
        yield made, temporary


def interrupted_at(number: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(number)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COMMAND_WAIT_S,
        check=False,
    )


def test_ctrl_c_at_any_import_is_no_traceback() -> None:
    whole = interrupted_at(NEVER)
    assert whole.returncode == NotMounted.exit_code
    ends = set()
    for number in range(1, int(whole.stdout) + 1, STEP):
        done = interrupted_at(number)
        assert done.stderr in ("", "kvfs: interrupted\n"), number
        assert done.stdout == ""
        ends.add(done.returncode)
    assert ends <= {-signal.SIGINT, INTERRUPTED_EXIT}
    assert -signal.SIGINT in ends


def test_what_is_told_to_ignore_ctrl_c_does() -> None:
    """As a shell tells what it starts in the background."""
    script = f"trap '' INT; exec {sys.executable} -c '{INTERRUPTED}' 5"
    done = subprocess.run(
        ["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == NotMounted.exit_code


@pytest.mark.needs_fuse
def test_a_demo_whose_terminal_is_closed_leaves_nothing(places: tuple[Path, Path]) -> None:
    skip_without_mounts()
    pool, temporary = places
    command = [*KVFS, "demo", "--source", str(pool), "--bytes", "2G"]
    with OnTerminal(command, {"TMPDIR": str(temporary)}) as demo:
        folder = Path(seen(demo, "Blocks go to ").removeprefix("Blocks go to "))
        demo.close()
        assert demo.ended() == HUNG_UP_EXIT
    assert not folder.parent.parent.exists()
    assert left_in(pool, temporary) == []


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
def test_a_bench_whose_terminal_is_closed_leaves_nothing(places: tuple[Path, Path]) -> None:
    skip_without_mounts()
    backing, temporary = places
    flags = ("--quick", "--device-size", "512M", "--jobs", "store-4m-1t-buffered,load-4m-1t-direct")
    command = [*KVFS, "bench", "compare", "--self-contained", "--backing", str(backing), *flags]
    with OnTerminal(command, {"TMPDIR": str(temporary)}) as bench:
        seen(bench, "store-")  # both sides are mounted, and the workers run
        bench.close()
        assert bench.ended() == HUNG_UP_EXIT
    assert left_in(backing, temporary) == []


@pytest.mark.needs_fuse
def test_a_demo_that_is_to_outlive_its_terminal_does(places: tuple[Path, Path]) -> None:
    """As after nohup."""
    skip_without_mounts()
    pool, temporary = places
    demo = shlex.join([*KVFS, "demo", "--source", str(pool), "--load-only", "--bytes", "24M"])
    script = f"trap '' HUP; echo ready; exec {demo} >{temporary.parent}/said 2>&1"
    with OnTerminal(["sh", "-c", script], {"TMPDIR": str(temporary)}) as terminal:
        seen(terminal, "ready")
        terminal.close()
        assert terminal.ended() == 0
    assert "every byte is as stored" in (temporary.parent / "said").read_text()
    assert left_in(pool, temporary) == []


def test_mount_kvfs_is_a_program_of_the_same_kind(tmp_path: Path) -> None:
    """mount(8) calls it with a wrong option: one line, and mount(8)'s own exit code."""
    script = "import sys; from kvfs.cli.program import mount_kvfs; sys.exit(mount_kvfs())"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "/none", "-o", "remount"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "mount.kvfs: a kvfs mount has no option remount\n"
    assert not os.listdir(tmp_path)
