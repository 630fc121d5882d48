"""Where the server's log lines go: a file, syslog (the journal reads it, too), or the terminal."""

import logging
import logging.handlers
import os
import socket
import sys
from contextlib import suppress
from typing import Any, Final

from kvfs.core.errors import UsageError
from kvfs.core.mount_name import log_path
from kvfs.core.settings import Settings
from kvfs.core.shown_names import printable
from mount.process.log_rate import RateLimited
from mount.supervisor.last_lines import SYSLOG_SOCKET

_LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BARE: Final = "%(name)s: %(message)s"
#: A line larger than the socket's send buffer would not be sent at all.
_DATAGRAM_MAX_BYTES: Final = 32 * 1024


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
