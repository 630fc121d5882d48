"""Standard input, output and error, which may be closed, full, or limited to few characters."""

import contextlib
import errno
import io
import os
import stat
import sys


class TerminalGone(OSError):
    """Standard output is a terminal that was closed.

    The kernel refuses to write to it first, and then sends SIGHUP (drivers/tty/tty_io.c).
    """


class _Output(io.TextIOWrapper):
    """Standard output that remembers a failed write, because the error may have been caught."""

    failed: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.failed = error
            raise


class _Remarks(io.TextIOWrapper):
    """Standard error. What cannot be written is dropped: no command fails because of a remark."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError:
            _drop(2)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError:
            _drop(2)


def _again(kind: type[io.TextIOWrapper], stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return *stream* as one of *kind*, which can print any file name."""
    return kind(
        stream.buffer,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def make_usable() -> None:
    """Open closed streams on /dev/null, and let all of them print any file name.

    Otherwise a file or pipe that is opened later would become the standard output of this process
    and of those that it starts.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free one: fd
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _again(_Output, sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _again(_Remarks, sys.stderr)
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Print *line* on standard error, if that works."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _drop(2)


def flush_output() -> OSError | None:
    """Flush standard output; return the error, if there was one, and drop what was not written.

    The error is TerminalGone if the terminal has hung up.
    """
    failed = None
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = error
    if isinstance(sys.stdout, _Output):
        failed = sys.stdout.failed
    if failed is not None:
        if failed.errno == errno.EIO and stat.S_ISCHR(os.fstat(1).st_mode):
            failed = TerminalGone(*failed.args)
        _drop(1)
    return failed


def _drop(fd: int) -> None:
    """Drop what was not written, which the interpreter would try to write again at its end."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, fd)
        os.close(null)
