"""Standard input, output and error as a caller leaves them: closed, full, or of few characters."""

import contextlib
import io
import os
import sys


class _Output(io.TextIOWrapper):
    """Standard output that remembers its failure: who prints may have caught the error."""

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
    """Standard error; what it does not take is dropped, since no command fails for a remark."""

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
    """Return *stream* as one of *kind*, to which no name fails to print."""
    return kind(
        stream.buffer,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def make_usable() -> None:
    """Open what is closed on /dev/null, and let no name fail to print.

    A file or pipe that is opened later would else become the standard output of this process and
    of those that it starts.
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
    """Print *line* on standard error, if anybody takes it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _drop(2)


def flush_output() -> OSError | None:
    """Flush standard output; return why it did not take all of it. What is left is dropped."""
    failed = None
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = error
    if isinstance(sys.stdout, _Output):
        failed = sys.stdout.failed
    if failed is not None:
        _drop(1)
    return failed


def _drop(fd: int) -> None:
    """Let all that was not written yet go nowhere, or the interpreter's end would try again."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, fd)
        os.close(null)
