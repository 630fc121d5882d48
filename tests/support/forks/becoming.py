"""A fork becomes a program: from here on it is as one that exec has started.

What exec takes away is taken away: handlers of signals, descriptors, what runs at the end of the
process, text that was not written yet. What it keeps is kept: masks, ignored signals, ids, limits.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib.machinery
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NoReturn, TextIO, cast

from tests.support.forks.names import take_name
from tests.support.forks.programs import Program

#: Python ends so when its output cannot be flushed.
_UNFLUSHED: Final = 120
#: What must never be finalized: it would write, or close a number that is another's by now.
_kept: list[object] = []


@contextlib.contextmanager
def blocked_signals() -> Iterator[set[int]]:
    """Block all signals meanwhile, as posix_spawn(3) does; yield what was blocked before.

    A handler that raises would lose the new process, or run in it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(
    program: Program,
    environment: Mapping[str, str],
    streams: Mapping[int, int] | None,
    first: Callable[[], object],
    mask: set[int],
) -> int:
    """Return a new process, which has done *first* and then become *program*: it runs now.

    All signals are blocked here (``blocked_signals``), and in it those of *mask*. For the rest
    see ``become``. As after exec, /proc tells of the program from now on.
    """
    reading, writing = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            try:
                first()
                become(program, environment, streams, mask, writing)
            finally:
                os._exit(1)
    finally:
        os.close(writing)
        # It ends when the new process has closed its end, by its own end if need be.
        os.read(reading, 1)
        os.close(reading)
    return pid


def become(
    program: Program,
    environment: Mapping[str, str],
    streams: Mapping[int, int] | None,
    mask: set[int],
    told_fd: int = -1,
) -> NoReturn:
    """Run *program* to its end in this process, which was just forked, with *environment*.

    *streams* are the descriptors that it has, each with the one it is a copy of; a closed one is
    closed. None: those that are inheritable. The signals of *mask* are blocked. *told_fd* is closed
    when all is as after exec.
    """
    exit_code = 1
    try:
        _forget()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if streams is None:
            _close_on_exec(told_fd)
        else:
            told_fd = _place(streams, told_fd)
        gc.freeze()
        take_name(program.words, environment)
        sys.orig_argv = list(program.words)
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        _open_standard_streams()
        if told_fd >= 0:
            os.close(told_fd)
        exit_code = _run(program)
    except BaseException:
        sys.excepthook(*_without_our_frames())
    finally:
        # Nothing of what was forked may go on, whatever fails here.
        os._exit(exit_code)


def _forget() -> None:
    """Take away what exec takes away, but for the descriptors."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            with contextlib.suppress(OSError, ValueError):  # SIGKILL, and the C library's own
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()
    atexit._clear()
    atexit.register(logging.shutdown)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    # Before the descriptors are gone: what closes one does so now.
    gc.collect()


def _close_on_exec(but_fd: int) -> None:
    for fd in _descriptors():
        with contextlib.suppress(OSError):
            if fd != but_fd and not os.get_inheritable(fd):
                os.close(fd)


def _place(streams: Mapping[int, int], told_fd: int) -> int:
    """Give this process the descriptors *streams* alone, and *told_fd*, which it returns anew."""
    above = max([*streams, *streams.values(), 2]) + 1
    copies = {}
    for number, fd in streams.items():
        with contextlib.suppress(OSError):  # closed there, and so here
            copies[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)
    if told_fd >= 0:
        told_fd = fcntl.fcntl(told_fd, fcntl.F_DUPFD_CLOEXEC, above)
    for number, copy in copies.items():
        os.dup2(copy, number, inheritable=True)
    for fd in _descriptors():
        if fd not in copies and fd != told_fd:
            with contextlib.suppress(OSError):
                os.close(fd)
    return told_fd


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _open_standard_streams() -> None:
    """Open them as the interpreter does at its start."""
    _kept.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    sys.stdin = sys.__stdin__ = _stream(0, "<stdin>")  # type: ignore[misc, assignment]
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>")  # type: ignore[misc, assignment]
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>")  # type: ignore[misc, assignment]


def _stream(fd: int, name: str) -> TextIO | None:
    try:
        raw = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
    except OSError:
        return None
    raw.name = name
    before = _BORN_WITH[fd]
    assert before is not None
    through = before.write_through  # PYTHONUNBUFFERED
    buffered = io.BufferedReader(raw) if not fd else raw if through else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        buffered,
        encoding=before.encoding,
        errors="backslashreplace" if fd == 2 else before.errors,
        newline="\n" if fd else None,
        line_buffering=not through and (fd == 2 or raw.isatty()),
        write_through=through,
    )
    stream.mode = "w" if fd else "r"  # type: ignore[misc]
    return stream


def _run(program: Program) -> int:
    """Run it as ``__main__`` and return its exit code, or die of SIGINT as Python does."""
    main = types.ModuleType("__main__")
    code: types.CodeType
    if program.module:
        spec = importlib.util.find_spec(program.module)
        assert spec is not None
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        code = cast("types.CodeType", spec.loader.get_code(program.module))
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        name = main.__file__ = str(spec.origin)
    elif program.file:
        name = main.__file__ = program.file
        code = compile(Path(name).read_bytes(), name, "exec")
    else:
        name, code = "-c", compile(program.code, "<string>", "exec")
    sys.argv = [name, *program.arguments]
    sys.modules["__main__"] = main
    exit_code = _exit_code_of(code, main)
    return _wind_up(exit_code)


def _exit_code_of(code: types.CodeType, main: types.ModuleType) -> int:
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*_without_our_frames())
        _wind_up(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*_without_our_frames())
        return 1
    return 0


def _without_our_frames() -> tuple[type[BaseException], BaseException, types.TracebackType | None]:
    kind, error, trace = sys.exc_info()
    assert kind is not None
    assert error is not None
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return kind, error.with_traceback(trace), trace


def _wind_up(exit_code: int) -> int:
    """Do what the interpreter does at its end; return the exit code that comes of it."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception as error:
            if stream is sys.stdout:
                exit_code = _UNFLUSHED
                told = f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}"
                print(told, file=sys.stderr)
    return exit_code


#: The standard streams of the interpreter that imports this: they tell the rules of its locale.
_BORN_WITH: Final = {0: sys.__stdin__, 1: sys.__stdout__, 2: sys.__stderr__}
