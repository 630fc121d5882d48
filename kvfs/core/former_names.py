"""Names that inodes had a moment ago: a LOOKUP before a rename still means the old name."""

from collections import OrderedDict
from typing import Final

from kvfs.core.types import InodeNo

#: A directory's inode and a name in it.
Place = tuple[InodeNo, bytes]

#: An open(2) that looked a name up sends its OPEN at once.
_KEPT_S: Final = 1.0
#: The oldest is forgotten first.
_MOST: Final = 256


class FormerNames:
    """The last name that each of the inodes moved lately had before, with the time of the move."""

    def __init__(self) -> None:
        self._moved: OrderedDict[InodeNo, tuple[Place, float]] = OrderedDict()

    def note(self, ino: InodeNo, place: Place, now_s: float) -> None:
        """*ino* was moved away from *place*."""
        self._moved[ino] = (place, now_s)
        self._moved.move_to_end(ino)
        if len(self._moved) > _MOST:
            self._moved.popitem(last=False)

    def of(self, ino: InodeNo, now_s: float) -> Place | None:
        """Return where *ino* was until a moment ago, None if it was not moved."""
        moved = self._moved.get(ino)
        return None if moved is None or moved[1] + _KEPT_S < now_s else moved[0]
