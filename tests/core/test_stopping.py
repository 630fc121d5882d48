"""What ends a command ends what it has started, which may take back what it began."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.stopping import exit_code_of

_GRACE_S = 20.0
#: Makes its file when it is told to end, and lives no longer than the test. It needs no other
#: process: ``timeout``, told to end right after its fork, leaves what it runs behind.
_TAKES_BACK = 'trap ": > \\"$1\\"; exit 7" TERM; {then}; read -r line'

#: Starts such a process, which first does what is said in a shell's words, and waits for a line.
Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    return tmp_path / "ended"


@pytest.fixture
def start(ended: Path) -> Iterator[Start]:
    reading, writing = os.pipe()
    told, telling = os.pipe()

    def started(then: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            ["sh", "-c", _TAKES_BACK.format(then=f"echo; {then}"), "sh", ended],
            env={**os.environ, "TEST": str(os.getpid())},
            stdin=reading,
            stdout=telling,
        )
        assert os.read(told, 1) == b"\n"
        return process

    yield started
    for fd in (reading, writing, told, telling):
        os.close(fd)


def test_it_may_take_back_what_it_began_when_the_wait_is_interrupted(
    start: Start, ended: Path
) -> None:
    """Killed, ``kvfs mount`` left its server behind, which then mounted what was taken down."""
    with pytest.raises(KeyboardInterrupt):
        exit_code_of(lambda: start('kill -INT "$TEST"'), _GRACE_S)
    assert ended.exists()


def test_what_comes_while_it_is_being_started_ends_it_too(start: Start, ended: Path) -> None:
    """``subprocess.Popen()`` interrupted has started a process, and tells nobody its number."""

    def interrupted() -> "subprocess.Popen[bytes]":
        process = start(":")
        signal.raise_signal(signal.SIGINT)
        return process

    with pytest.raises(KeyboardInterrupt):
        exit_code_of(interrupted, _GRACE_S)
    assert ended.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored(start: Start) -> None:
    """A second Ctrl-C must not cut short what the first one has begun to take down."""

    def interrupted() -> "subprocess.Popen[bytes]":
        signal.raise_signal(signal.SIGINT)
        return start("exit 3")

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert exit_code_of(interrupted, _GRACE_S) == 3
    finally:
        signal.signal(signal.SIGINT, before)
