"""A walk from an inode up to the root, which ends even if the directories form a cycle. Pure.

A checksum proves that a row is intact, not that the rows form a tree. In a forged index, or one
that lost a write, a directory may be its own ancestor. A tree may have any depth, so the number of
steps cannot be limited; but a walk up a tree never meets a directory twice.

Cycles are found by Brent's algorithm (R. P. Brent, An improved Monte Carlo factorization algorithm,
BIT 20, 1980): it remembers one inode, and replaces it by the current one after 1, 2, 4, ... steps.
A walk takes less than three times the steps into the cycle and once around it, and constant memory.
"""

from kvfs.core.types import NO_INODE, InodeNo


class Ascent:
    """One walk. The caller calls ``goes_on`` with the current inode before each step."""

    __slots__ = ("_left", "_remembered", "_steps")

    def __init__(self) -> None:
        self._remembered = NO_INODE
        self._left = self._steps = 1

    def goes_on(self, ino: InodeNo) -> bool:
        """Return whether to go on from *ino*; False if the walk is known to have passed it."""
        if ino == self._remembered:
            return False
        self._left -= 1
        if not self._left:
            self._remembered = ino
            self._steps *= 2
            self._left = self._steps
        return True
