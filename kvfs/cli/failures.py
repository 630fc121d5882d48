"""How a command fails: without the rights it needs, by a signal, or by an error.

The operator reads one line, and a script the exit code. SIGTERM and a terminal that is closed end a
command as Ctrl-C does, so that it can undo what it began.
"""

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from kvfs.core.errors import CommandError, KvfsError, NotRoot, UsageError
from kvfs.core.shown_names import printable

#: EX_SOFTWARE of sysexits.h: a bug in kvfs.
INTERNAL_ERROR_EXIT = 70
#: 128 + SIGINT, as shells report it.
INTERRUPTED_EXIT = 130
#: 128 + SIGTERM.
TERMINATED_EXIT = 143
#: 128 + SIGHUP.
HUNG_UP_EXIT = 129
#: linux/capability.h.
_CAP_SYS_ADMIN: Final = 21
#: linux/proc_ns.h, PROC_USER_INIT_INO. Root of another user namespace is not root of the machine.
_FIRST_USER_NAMESPACE: Final = 0xEFFFFFFD


def need_root(what: str) -> None:
    """Raise NotRoot unless we are root with CAP_SYS_ADMIN, which a container may lack."""
    if os.geteuid() != 0:
        raise NotRoot(f"{what} needs root")
    if not _may_administer():
        raise NotRoot(
            f"{what} needs root with CAP_SYS_ADMIN, which this process does not have: give it to "
            "the container, and use no user namespace"
        )


def _may_administer() -> bool:
    """Whether we have CAP_SYS_ADMIN of the machine itself; True if /proc does not tell."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
            held = [int(line.split()[1], 16) for line in status if line.startswith("CapEff:")]
        namespace = os.stat("/proc/self/ns/user").st_ino
    except OSError:
        return True
    return namespace == _FIRST_USER_NAMESPACE and all(mask >> _CAP_SYS_ADMIN & 1 for mask in held)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


class TerminalClosed(KeyboardInterrupt):
    """SIGHUP came."""


def _terminated(*_: object) -> NoReturn:
    raise Terminated


def _hung_up(*_: object) -> NoReturn:
    raise TerminalClosed


_STOPS: Final = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: _terminated,
    signal.SIGHUP: _hung_up,
}


@contextmanager
def stops_raise() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, Terminated at SIGTERM, TerminalClosed at SIGHUP.

    But not for a signal that was ignored when we started (nohup), or has a handler.
    """
    found = [number for number in _STOPS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in found:
            signal.signal(number, _STOPS[number])
        yield
    finally:
        for number in found:
            signal.signal(number, signal.SIG_DFL)


def explain(error: BaseException) -> tuple[str, int]:
    """Return the line for *error* and the process's exit code.

    The traceback of an unexpected error goes to a file, or to stderr with KVFS_DEBUG=1.
    """
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return explain(error.exceptions[0])
    if isinstance(error, Terminated):
        return "terminated", TERMINATED_EXIT
    if isinstance(error, TerminalClosed):
        return "the terminal was closed", HUNG_UP_EXIT
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED_EXIT
    if isinstance(error, KvfsError):
        exit_code = error.exit_code if isinstance(error, CommandError) else CommandError.exit_code
        return one_line(str(error) or type(error).__name__), exit_code
    if isinstance(error, FileNotFoundError) and _directory_is_gone():
        return (
            "the current directory was removed; change to another one, or give absolute paths",
            UsageError.exit_code,
        )
    what = one_line(f"{type(error).__name__}: {error}")
    return f"internal error: {what} ({_keep_traceback(error)})", INTERNAL_ERROR_EXIT


def _directory_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def one_line(text: str) -> str:
    """Return *text* as one line for logs and scripts, with its line breaks replaced.

    Characters that would control the terminal are escaped.
    """
    return printable(" ".join(text.split()))


def _keep_traceback(error: BaseException) -> str:
    if os.environ.get("KVFS_DEBUG") == "1":
        traceback.print_exception(error)
        return "traceback above"
    import tempfile  # slow to import, and mostly there is no traceback

    try:
        fd, path = tempfile.mkstemp(prefix="kvfs-traceback-", suffix=".txt")
        with open(fd, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return "KVFS_DEBUG=1 shows the traceback"
    return f"traceback in {path}"
