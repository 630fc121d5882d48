"""What ends a command: held back where something would be left behind, told to what was started."""

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
def held_back() -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM wait until this is left, or until what it yields is called.

    On the main thread. Raised inside ``subprocess.Popen()`` or ``os.open()``, a
    ``KeyboardInterrupt`` loses what was begun: it is there, and nobody has its number. Cython's
    modules lose the exception while they are imported. What is ignored stays ignored.
    """
    came: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    def let_through() -> None:
        while came:
            number = came.pop(0)
            _deliver(number, before[number])

    before = {int(number): signal.getsignal(number) for number in _STOPS}
    held = [number for number in before if before[number] not in (signal.SIG_IGN, None)]
    try:
        for number in held:
            signal.signal(number, hold)
        yield let_through
    finally:
        for number in held:
            signal.signal(number, before[number])
        let_through()


def _deliver(number: int, handler: object) -> None:
    if callable(handler):
        handler(number, None)
    else:  # the default, which ends us
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def stop(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End *process*, with *grace_s* to take back what it began; then by force."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
