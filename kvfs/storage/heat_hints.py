"""What hints say of blocks: a row a block, beside the rows of the heat; only in memory.

A row takes 6 bytes, and none before the first hint. The rows of blocks that are stored later are
made when one of them gets a hint.
"""

from enum import IntEnum
from typing import Final

import numpy as np

from kvfs.core.eviction_policy import Retention

#: The end of a hint without one.
ALWAYS_S: Final = (1 << 32) - 1


class Told(IntEnum):
    """What a client told by the hints socket, which counts before attributes."""

    NOTHING = 0
    RETAIN = 1
    DEMOTE = 2


class HeatHints:
    """The rows of one heat. A scan in a thread may read them meanwhile."""

    def __init__(self) -> None:
        self._priority = np.zeros(0, np.uint8)
        self._until_s = np.zeros(0, np.uint32)
        self._told = np.zeros(0, np.uint8)

    def set(self, row: int, priority: int, until_s: int, told: Told, rows: int) -> None:
        """Note a hint for *row* of *rows*; *until_s* is of the clock of ages."""
        if row >= len(self._told):
            more = (0, rows - len(self._told))
            self._priority = np.pad(self._priority, more)
            self._until_s = np.pad(self._until_s, more)
            self._told = np.pad(self._told, more)
        self._priority[row] = priority
        self._until_s[row] = min(until_s, ALWAYS_S)
        self._told[row] = told

    def clear(self, row: int) -> None:
        """Forget what was said of *row*."""
        if row < len(self._told):
            self._told[row] = self._priority[row] = self._until_s[row] = 0

    def told(self, row: int, now_s: int) -> Told:
        """Return what was told of *row* and counts still at *now_s*; row 0 is no block's."""
        if row >= len(self._told) or self._until_s[row] <= now_s:
            return Told.NOTHING
        return Told(self._told[row])

    def columns(self, now_s: int) -> Retention:
        """Return the rows for a scan at *now_s*."""
        return Retention(self._priority, self._until_s, now_s)
