"""File descriptors kept in reserve, for checks that must work when all others are used."""

import contextlib
import os
from typing import Final

#: One question needs one at a time; between two ticks some hundred files may be closed, but what
#: is opened for a question is closed with it, and the next one finds the descriptor again.
_KEPT: Final = 8


class SpareFiles:
    """The reserve; empty until its first ``refill``."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def refill(self) -> None:
        """Take again what was given, as far as there is any."""
        with contextlib.suppress(OSError):
            while len(self._fds) < _KEPT:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def give_one(self) -> bool:
        """Close one; False if none is left."""
        if not self._fds:
            return False
        os.close(self._fds.pop())
        return True

    def close(self) -> None:
        """Close all."""
        while self.give_one():
            pass
