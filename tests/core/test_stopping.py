"""What ends a command ends what it has started, which may take back what it began."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.client.subprocesses import exit_code_of, held_back

_GRACE_S = 20.0
#: Makes its file when it is told to end. Not a shell with a trap: what comes just before its
#: ``read`` waits for a line to be seen.
_TAKES_BACK = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.write(1, b"begun")
if sys.argv[2] == "interrupts":
    os.kill(os.getppid(), signal.SIGINT)
elif sys.argv[2] == "ends":
    sys.exit(3)
if signal.sigtimedwait([signal.SIGTERM], 60):
    open(sys.argv[1], "x")
"""

#: Starts such a process, which "interrupts" us, "waits" or "ends", and returns once it has begun.
Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    return tmp_path / "ended"


@pytest.fixture
def start(ended: Path) -> Iterator[Start]:
    told, telling = os.pipe()

    def started(then: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-I", "-c", _TAKES_BACK, str(ended), then]
        process = subprocess.Popen(command, stdout=telling)
        assert os.read(told, 5) == b"begun"
        return process

    yield started
    for fd in (told, telling):
        os.close(fd)


def test_it_may_take_back_what_it_began_when_the_wait_is_interrupted(
    start: Start, ended: Path
) -> None:
    """Killed, ``kvfs mount`` left its server behind, which then mounted what was taken down."""
    with pytest.raises(KeyboardInterrupt):
        exit_code_of(lambda: start("interrupts"), _GRACE_S)
    assert ended.exists()


def test_what_comes_while_it_is_being_started_ends_it_too(start: Start, ended: Path) -> None:
    """``subprocess.Popen()`` interrupted has started a process, and tells nobody its number."""

    def interrupted() -> "subprocess.Popen[bytes]":
        process = start("waits")
        signal.raise_signal(signal.SIGINT)
        return process

    with pytest.raises(KeyboardInterrupt):
        exit_code_of(interrupted, _GRACE_S)
    assert ended.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_held_back_comes_when_it_is_let_through() -> None:
    """A demo that opens files on its own mount ends between two of them: it unmounts next."""
    done = []
    with held_back() as let_through:
        signal.raise_signal(signal.SIGINT)
        done.append("opened and closed")
        with pytest.raises(KeyboardInterrupt):
            let_through()
        let_through()
        done.append("told once")
    assert done == ["opened and closed", "told once"]


def test_what_is_ignored_stays_ignored(start: Start) -> None:
    """A second Ctrl-C must not cut short what the first one has begun to take down."""

    def interrupted() -> "subprocess.Popen[bytes]":
        signal.raise_signal(signal.SIGINT)
        return start("ends")

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert exit_code_of(interrupted, _GRACE_S) == 3
    finally:
        signal.signal(signal.SIGINT, before)
