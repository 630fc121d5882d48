"""Names that several writers used lately: a rename of one may mean another writer's draft."""

from collections import OrderedDict
from typing import Final

from kvfs.core.types import InodeNo

#: The oldest is believed to be at peace.
_MOST: Final = 1024


class FoughtOver:
    """The names, each until when."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[tuple[InodeNo, bytes], float] = OrderedDict()

    def note(self, parent: InodeNo, name: bytes, until_s: float) -> None:
        """A writer took *name* from another one."""
        self._until_s[parent, name] = until_s
        self._until_s.move_to_end((parent, name))
        if len(self._until_s) > _MOST:
            self._until_s.popitem(last=False)

    def is_still(self, parent: InodeNo, name: bytes, now_s: float) -> bool:
        """Whether somebody may mean another's draft by *name*."""
        until_s = self._until_s.get((parent, name))
        return until_s is not None and until_s > now_s
