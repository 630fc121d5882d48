"""Running other programs, kvfs itself among them, so that they end with the command."""

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

#: A list of all processes on a big machine takes a fraction of this.
LOOK_MAX_S: Final = 3.0
#: From SIGTERM to SIGKILL of a program that a command runs; kvfs mount gives its server 10 s.
_GRACE_S: Final = 15.0
#: Signals that end a command.
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def program_again(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs *module*, and the environment in which it is found.

    ``-P``: root's working directory may hold somebody's module called trio. A command that heeds no
    variable of Python's (``python -I``, as the Debian package's) passes none on.
    """
    home, is_isolated = home_of_kvfs(), bool(sys.flags.ignore_environment)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not (is_isolated and name.startswith("PYTHON"))
    }
    if is_isolated:
        environment["PYTHONNOUSERSITE"] = "1"
    if home != os.path.realpath(sysconfig.get_path("purelib")):
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{others}" if others else home
    folder, python = os.path.split(sys.executable)
    return [os.path.join(os.path.realpath(folder), python), "-P", "-m", module], environment


def home_of_kvfs() -> str:
    """Return the folder where this version lies, without symlinks: they may be put elsewhere."""
    return os.path.realpath(os.path.dirname(os.path.dirname(kvfs.__file__)))


def supervised(arguments: Sequence[str], ready_fd: int) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of the supervisor of ``kvfs *arguments*``.

    *arguments* are those of a server. Its first start reports at *ready_fd* (-1: nowhere) how it
    went. The supervisor imports nothing that was installed (mount/supervisor/__main__.py). For an
    upgrade it runs this command again from the same path, where another version may lie by then.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = "/"
    server, environment = program_again("kvfs.cli.main")
    file = f"{home_of_kvfs()}/mount/supervisor/__main__.py"
    supervisor = [sys.executable, "-I", "-S", file, str(ready_fd)]
    command = os.path.abspath(sys.argv[0])
    is_installed = os.path.basename(command) == "kvfs" and os.access(command, os.X_OK)
    words = [command if is_installed else "", *server, "--", *arguments]
    return [*supervisor, *words, "--started-in", here], environment


def seen_in_time(module: str, mountpoint: str) -> list[bytes]:
    """Return the complete lines that *module* prints about *mountpoint* within 3 s.

    Such a module looks at every process and can hang in one of them, so it is a separate program.
    """
    exit_code, printed = _run_in_time(module, mountpoint)
    return (printed.rpartition(b"\n")[0] if exit_code is None else printed).splitlines()


def ended_in_time(module: str, argument: str) -> int | None:
    """Return the exit code of *module*, run with *argument*; None if it takes more than 3 s."""
    return _run_in_time(module, argument)[0]


def _run_in_time(module: str, argument: str) -> tuple[int | None, bytes]:
    """Return exit code and output of *module*, which is left behind if it takes too long.

    It is killed then, but not waited for: it may hang in the kernel, which ends for no signal.
    """
    command, environment = program_again(module)
    program = subprocess.Popen(
        [*command, argument],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        printed, _ = program.communicate(timeout=LOOK_MAX_S)
    except subprocess.TimeoutExpired as late:
        program.kill()
        if program.stdout is not None:
            program.stdout.close()
        program.returncode = 0  # it may live longer than we do, of which Popen would warn
        return None, late.output or b""
    return program.returncode, printed


def output_of(
    command: Sequence[str], environment: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run *command* to its end; a signal that ends us ends it, too."""
    from tempfile import TemporaryFile  # slow to import, and not all commands run a program

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
    """Ignore what ends a command, so that a second Ctrl-C does not end the clean-up half-way.

    Programs started meanwhile ignore them, too.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_of(start: "Callable[[], subprocess.Popen[bytes]]", grace_s: float) -> int:
    """Return the exit code of the process that *start* starts; a signal that ends us ends it, too.

    The process then has *grace_s* to undo what it began. If killed at once, as ``subprocess.run``
    does, ``kvfs mount`` would leave a server behind that comes up after everything was removed.
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
    """Hold what ends a command back until the ``with`` ends, or until the yielded call is made.

    For the main thread. A ``KeyboardInterrupt`` inside ``subprocess.Popen()`` or ``os.open()``
    loses the new process or descriptor: it exists, and nobody has its number. An import of a Cython
    module loses the exception. Ignored signals stay ignored.
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
    else:  # the default: the signal ends us
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def stop(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End *process*: it has *grace_s* to undo what it began, and is then killed."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
