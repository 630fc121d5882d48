"""What the file system below can really hold: less than the capacity when others fill it.

The index, the heat and the file system's own trees grow with the blocks, and a directory's parent
file system belongs to others as well. So the bound is the capacity or what is there, if less.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from kvfs.pool.space import Space

#: Kept free of blocks: what writes in flight and the file system's own growth take between looks.
_KEPT_SHARE: Final = 1 / 64
_KEPT_MOST_BYTES: Final = 32 << 20
#: XFS frees the blocks of what was unlinked a moment later: the best of so many looks counts.
_LOOKS: Final = 8


class DeviceRoom:
    """Looks at the device, and tells the space."""

    def __init__(self, space: Space, free_bytes: Callable[[], int]) -> None:
        """*free_bytes* tells what can still be allocated (statvfs(2))."""
        self._space = space
        self._free_bytes = free_bytes
        self._looks: deque[int] = deque(maxlen=_LOOKS)
        self._kept_bytes = min(int(space.capacity_bytes * _KEPT_SHARE), _KEPT_MOST_BYTES)

    def look(self) -> None:
        """Look again; called every tick. Raises OSError."""
        space = self._space
        self._looks.append(space.taken_bytes + self._free_bytes() - self._kept_bytes)
        space.bound_bytes = max(0, min(space.capacity_bytes, max(self._looks)))

    def refused(self) -> None:
        """The device had no room: what was seen before counts for nothing. Raises OSError."""
        self._looks.clear()
        self.look()
