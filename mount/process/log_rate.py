"""Limits the log lines per minute of each kind; then one line says how many were left out.

A kind is a logger and its format string, so that a storm of one error with changing numbers is
one kind.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Final

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
