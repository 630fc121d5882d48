"""Ending a process that a command has started, when the command itself is ended."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

_STOPS: Final = (signal.SIGINT, signal.SIGTERM)


def exit_code_of(start: "Callable[[], subprocess.Popen[bytes]]", grace_s: float) -> int:
    """Return the exit code of the process that *start* starts; what ends us ends it, too.

    It gets *grace_s* then to take back what it began: killed at once, as ``subprocess.run`` does,
    ``kvfs mount`` leaves a server behind that comes up after everything else was taken down.
    """
    process = None
    try:
        with held_back():
            process = start()
        return process.wait()
    except BaseException:
        if process is not None:
            stop(process, grace_s)
        raise


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait until this is left, in the main thread.

    Raised inside ``subprocess.Popen()``, a ``KeyboardInterrupt`` loses the process: it runs, and
    nobody has its number. What is ignored stays ignored.
    """
    came: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in _STOPS}
    held = [number for number in _STOPS if before[number] not in (signal.SIG_IGN, None)]
    try:
        for number in held:
            signal.signal(number, hold)
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for came_number in came:
            signal.raise_signal(came_number)


def stop(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End *process*, with *grace_s* to take back what it began; then by force."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
