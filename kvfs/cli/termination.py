"""SIGTERM ends a command as Ctrl-C does, so that it can undo what it began."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated at SIGTERM, unless the signal was ignored when we were started."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(*_: object) -> NoReturn:
    raise Terminated
