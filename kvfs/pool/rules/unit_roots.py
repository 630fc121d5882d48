"""Which directories set ``evict=together``: the units of one pool, for what is told of them."""

from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.directory_policy import EVICT
from kvfs.core.types import InodeNo

TOGETHER: Final = b"together"


class UnitRoots:
    """The directories whose attribute says so, found by a scan after a start and kept since."""

    follows: Final = frozenset(
        {Why.ATTRIBUTED, Why.REPLACED, Why.REMOVED, Why.LOST, Why.RECONCILED}
    )

    def __init__(self) -> None:
        self._roots: set[InodeNo] = set()

    def follow(self, changed: Changed) -> None:
        """Enter or drop a directory."""
        if changed.after is None:
            self._roots.discard(changed.ino)
        elif EVICT in changed.gained:
            self.learn(changed.ino, changed.gained[EVICT])
        elif EVICT in changed.lost:
            self._roots.discard(changed.ino)

    def learn(self, ino: InodeNo, value: bytes) -> None:
        """Note the *value* of the attribute of directory *ino*."""
        if value == TOGETHER:
            self._roots.add(ino)
        else:
            self._roots.discard(ino)

    def all(self) -> list[InodeNo]:
        """Return the directories, oldest first."""
        return sorted(self._roots)
