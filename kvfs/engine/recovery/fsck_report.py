"""What fsck found, with a limit: a pool with a million broken rows must not fill the memory."""

from typing import Final

#: More problems than this are only counted.
PROBLEMS_MAX: Final = 10_000


class FsckReport:
    """What is wrong with a pool, one line for each problem, and what was done about it.

    ``repaired`` counts repairs; ``blocks`` and ``directories`` count what the pool holds.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.found = 0
        self.repaired = 0
        self.blocks = 0
        self.directories = 0
        #: Extents whose bytes failed their checksum: inode, bytes.
        self.quarantined: tuple[tuple[int, int], ...] = ()
        #: Files that belong to no inode, kept for a while: inode, bytes, since when (ns).
        self.strays: tuple[tuple[int, int, int], ...] = ()

    def problem(self, text: str) -> None:
        """Note a problem."""
        self.found += 1
        if self.found <= PROBLEMS_MAX:
            self.problems.append(text)
        elif self.found == PROBLEMS_MAX + 1:
            self.problems.append(f"and more than {PROBLEMS_MAX} others")
