"""A truncating OPEN or CREATE that was refused: the kernel looks the name up and tries again."""

from typing import NamedTuple

from kvfs.types import InodeNo


class Refusal(NamedTuple):
    """What was answered ESTALE, and is tried again at once: an OPEN of *ino*, 0 for a CREATE."""

    ino: InodeNo
    until_s: float
    #: Whether the LOOKUP of the second try has come.
    looked: bool

    def is_met_by(self, ino: InodeNo, now_s: float) -> bool:
        """Whether an OPEN of *ino* now tries again without a LOOKUP: by handle, or /proc/PID/fd."""
        return self.ino == ino and not self.looked and now_s < self.until_s
