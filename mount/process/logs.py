"""Where the server's log lines go: a file, syslog (the journal reads it, too), or the terminal.

The lines per minute of each kind are limited; then one line says how many were left out. A kind is
a logger and its format string, so that a storm of one error with changing numbers is one kind.
"""

import logging
import logging.handlers
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kvfs.core.errors import UsageError
from kvfs.core.mount_name import log_path
from kvfs.core.settings import Settings
from kvfs.core.shown_names import printable
from mount.supervisor.last_lines import SYSLOG_SOCKET

_LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BARE: Final = "%(name)s: %(message)s"
#: A line larger than the socket's send buffer would not be sent at all.
_DATAGRAM_MAX_BYTES: Final = 32 * 1024
WINDOW_S: Final = 60.0
#: The source has a few hundred kinds; beyond this number they share one window.
KINDS_MAX: Final = 1024
_Kind = tuple[str, str]
_SHARED: Final[_Kind] = ("", "other messages")


class _Window:
    __slots__ = ("lines", "started_s", "suppressed", "worst")

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.lines = 0
        self.suppressed = 0
        self.worst = logging.DEBUG


class RateLimited(logging.Handler):
    """Passes records on to *target* within the limit."""

    def __init__(
        self,
        target: logging.Handler,
        lines_per_minute: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.target = target
        self.lines_per_minute = lines_per_minute
        self._clock_s = clock_s
        self._windows: dict[_Kind, _Window] = {}
        self._sweep_at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now_s = self._clock_s()
        if now_s >= self._sweep_at_s:
            self._sweep(now_s)
        window = self._window((record.name, str(record.msg)), now_s)
        if window.lines < self.lines_per_minute:
            window.lines += 1
            self.target.handle(record)
            return
        window.suppressed += 1
        window.worst = max(window.worst, record.levelno)

    def close(self) -> None:
        """Log how many lines were left out so far, and close the target."""
        self.acquire()
        try:
            self._sweep(math.inf)
        finally:
            self.release()
        self.target.close()
        super().close()

    def _window(self, kind: _Kind, now_s: float) -> _Window:
        window = self._windows.get(kind)
        if window is None and len(self._windows) >= KINDS_MAX:
            kind = _SHARED
            window = self._windows.get(kind)
        if window is None or now_s - window.started_s >= WINDOW_S:
            if window is not None:
                self._report(kind, window)
            window = self._windows[kind] = _Window(now_s)
        return window

    def _sweep(self, now_s: float) -> None:
        self._sweep_at_s = now_s + WINDOW_S / 12
        for kind, window in list(self._windows.items()):
            if now_s - window.started_s >= WINDOW_S:
                del self._windows[kind]
                self._report(kind, window)

    def _report(self, kind: _Kind, window: _Window) -> None:
        if window.suppressed:
            name, message = kind
            self.target.handle(
                logging.LogRecord(
                    name,
                    window.worst,
                    "",
                    0,
                    "suppressed %d more of: %s",
                    (window.suppressed, message),
                    None,
                )
            )


class SyslogHandler(logging.handlers.DatagramHandler):
    """Sends records to syslog. If the queue of its reader is full, a record is lost.

    The standard SysLogHandler would wait while the queue is full, and the mount would hang.
    """

    def __init__(self, pool: str, path: str = SYSLOG_SOCKET) -> None:
        """Raises OSError if nobody listens at *path*."""
        super().__init__(path, None)
        self._pool = pool
        with self.makeSocket() as probe:
            probe.connect(path)

    def makeSocket(self) -> socket.socket:  # type: ignore[override]  # as logging has it
        """Return a socket that never waits."""
        made = super().makeSocket()
        made.setblocking(False)
        return made

    def makePickle(self, record: logging.LogRecord) -> bytes:
        """Return the line of syslog(3) that is sent in place of a pickle."""
        names = logging.handlers.SysLogHandler
        level = names.priority_names.get(record.levelname.lower(), names.LOG_NOTICE)
        priority = names.LOG_DAEMON << 3 | level
        line = f"<{priority}>kvfs[{os.getpid()}]: {self._pool}: {self.format(record)}"
        return line.encode(errors="backslashreplace")[:_DATAGRAM_MAX_BYTES]


def set_up_logging(settings: Settings, *, background: bool) -> str:
    """Send all log records to one place, rate limited, and return the name of that place.

    In the foreground without systemd it is stderr. Raises UsageError if the log file cannot be
    written.
    """
    # Otherwise a handler that fails would print a traceback for each record.
    logging.raiseExceptions = False
    root = logging.getLogger()
    close_logging()
    if settings.log_level == "off":
        logging.disable(logging.CRITICAL)
        return "nowhere"
    target, place = _target(settings, background=background)
    root.addHandler(RateLimited(target, settings.log_lines_per_minute))
    apply_levels(settings)
    return place


def apply_levels(settings: Settings) -> None:
    """Take level and rate limit from *settings*; for SIGHUP."""
    root = logging.getLogger()
    if settings.log_level == "off":
        logging.disable(logging.CRITICAL)
        return
    logging.disable(logging.NOTSET)
    root.setLevel(settings.log_level.upper())
    for handler in root.handlers:
        if isinstance(handler, RateLimited):
            handler.lines_per_minute = settings.log_lines_per_minute


def close_logging() -> None:
    """Log how many lines the rate limit left out, and close the log."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, RateLimited):
            root.removeHandler(handler)
            handler.close()


def _target(settings: Settings, *, background: bool) -> tuple[logging.Handler, str]:
    if settings.log_file:
        return _file(settings.log_file), settings.log_file
    under_systemd = "JOURNAL_STREAM" in os.environ
    if not background and not under_systemd:
        return _formatted(logging.StreamHandler(sys.stderr), _LINE), "stderr"
    with suppress(OSError):  # nobody listens there: try the next place
        return _formatted(SyslogHandler(settings.name), _BARE), "syslog"
    path = log_path(settings.name)
    with suppress(OSError):  # _file() reports it better
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    return _file(path), path


def _file(path: str) -> logging.Handler:
    try:
        handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8")  # for logrotate
    except OSError as error:
        raise UsageError(f"log file {path}: {error.strerror}") from None
    return _formatted(handler, _LINE)


class _OneLineEach(logging.Formatter):
    """Writes a record as one line, its traceback indented, so that no name can forge a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: ANN401 - as logging has it
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


def _formatted(handler: logging.Handler, line: str) -> logging.Handler:
    handler.setFormatter(_OneLineEach(line))
    return handler
