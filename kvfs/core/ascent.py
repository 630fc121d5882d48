"""A walk from an inode up to the root, which ends even where directories lead in a circle. Pure.

A checksum says that a row is as it was written, not that the rows make a tree: an index that
somebody made, or one with a lost write, may have a directory above itself. A tree may be of any
depth, so no number of steps is too many; but nobody comes to a directory twice on the way up.

It is Brent's way to find a cycle (R. P. Brent, An improved Monte Carlo factorization algorithm,
BIT 20, 1980): one inode is remembered, and replaced by the present one after 1, 2, 4, ... steps. So
a walk is less than three times as long as the way into the circle and once around it, and takes no
memory.
"""

from kvfs.core.types import NO_INODE, InodeNo


class Ascent:
    """One walk. Its owner asks ``goes_on`` before each step, with the inode that it has come to."""

    __slots__ = ("_left", "_remembered", "_steps")

    def __init__(self) -> None:
        self._remembered = NO_INODE
        self._left = self._steps = 1

    def goes_on(self, ino: InodeNo) -> bool:
        """Whether *ino*, where the walk is now, is not known to be passed before."""
        if ino == self._remembered:
            return False
        self._left -= 1
        if not self._left:
            self._remembered = ino
            self._steps *= 2
            self._left = self._steps
        return True
