"""What the operator reads when a command fails: one line, and the exit code."""

import os
import tempfile
import traceback

from kvfs.cli.termination import Terminated
from kvfs.core.errors import CommandError, KvfsError, UsageError
from kvfs.core.printable import printable

#: EX_SOFTWARE of sysexits.h: a bug in kvfs.
INTERNAL_ERROR_EXIT = 70
#: 128 + SIGINT, as shells report it.
INTERRUPTED_EXIT = 130
#: 128 + SIGTERM.
TERMINATED_EXIT = 143


def explain(error: BaseException) -> tuple[str, int]:
    """Return the line for *error* and the process's exit code.

    The traceback of an unexpected error goes to a file, or to stderr with KVFS_DEBUG=1.
    """
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return explain(error.exceptions[0])
    if isinstance(error, Terminated):
        return "terminated", TERMINATED_EXIT
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
    try:
        fd, path = tempfile.mkstemp(prefix="kvfs-traceback-", suffix=".txt")
        with open(fd, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return "KVFS_DEBUG=1 shows the traceback"
    return f"traceback in {path}"
