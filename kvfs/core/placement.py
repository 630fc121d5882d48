"""On which drive of a pool the next block is placed. Pure."""

from collections.abc import Sequence
from typing import Final

from kvfs.core.types import DriveNo


class DriveTurns:
    """Takes drives in turn, each as often as what it can hold is of the whole.

    So drives of different sizes fill at the same rate. The turns of one are as far apart as they
    can be: each drive earns its weight at every turn, and the one that is owed most has it and pays
    for all (smooth weighted round robin, as in nginx).
    """

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        """*capacities_bytes*: what each drive can hold, by number; not all of them 0."""
        self._weights: Final = tuple(capacities_bytes)
        self._whole: Final = sum(capacities_bytes)
        self._owed = [0] * len(self._weights)
        assert self._whole > 0, "nothing can be held"

    def next(self) -> DriveNo:
        """Return the drive whose turn it is."""
        for drive, weight in enumerate(self._weights):
            self._owed[drive] += weight
        drive = self._owed.index(max(self._owed))
        self._owed[drive] -= self._whole
        return DriveNo(drive)
