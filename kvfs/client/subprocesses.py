"""Other programs that a command runs, this very kvfs among them, and what ends them with it."""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

import kvfs

#: A look at every process on a big machine takes a fraction of it.
LOOK_MAX_S: Final = 3.0
#: From SIGTERM to SIGKILL for what a command runs; kvfs mount itself gives its server 10 s.
_GRACE_S: Final = 15.0
#: What ends a command.
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)


def program_again(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs *module*, and the environment in which it is found.

    ``-P``: a root shell may stand in a directory with a module of somebody's called trio.
    """
    environment = dict(os.environ)
    home = os.path.dirname(os.path.dirname(os.path.abspath(kvfs.__file__)))
    if home != sysconfig.get_path("purelib"):
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{others}" if others else home
    return [sys.executable, "-P", "-m", module], environment


def seen_in_time(module: str, mountpoint: str) -> list[bytes]:
    """Return the whole lines that *module*, which looks at who uses *mountpoint*, prints in 3 s.

    A look through every process can hang in one of them, and is a program of its own for that.
    """
    command, environment = program_again(module)
    try:
        done = subprocess.run(
            [*command, mountpoint],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=LOOK_MAX_S,
            check=False,
        )
        printed = done.stdout
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").rpartition(b"\n")[0]
    return printed.splitlines()


def output_of(
    command: Sequence[str], environment: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run *command* to its end; what ends us ends it, too."""
    from tempfile import TemporaryFile  # slow to import, for a command that runs nothing

    # Files, not pipes: a server in the background may keep its standard output open.
    with TemporaryFile("w+") as printed, TemporaryFile("w+") as said:
        exit_code = exit_code_of(
            lambda: subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=said
            ),
            _GRACE_S,
        )
        printed.seek(0)
        said.seek(0)
        return subprocess.CompletedProcess(command, exit_code, printed.read(), said.read())


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no second Ctrl-C leave half of it standing; what is started meanwhile has none, too."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
