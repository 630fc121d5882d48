"""A truncating OPEN that was refused: the kernel's own second try will open a fresh inode."""

from typing import NamedTuple

from kvfs.types import InodeNo


class Refusal(NamedTuple):
    """A truncating OPEN of *ino* that was answered ESTALE; the kernel tries again at once."""

    ino: InodeNo
    until_s: float
    #: Whether the LOOKUP of the second try has come.
    looked: bool
