"""File descriptors kept in reserve, for checks that must work when all others are used."""

import contextlib
import os
from typing import Final

#: A check needs one descriptor at a time and closes it afterwards, so a few are enough, even if
#: some hundred files are closed between two ticks.
_KEPT: Final = 8


class SpareFiles:
    """The reserve; empty until its first ``refill``."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def refill(self) -> None:
        """Open as many as were given out, as far as possible."""
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
