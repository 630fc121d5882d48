"""How many of the server's descriptors clients may take: each user, and all of them together.

An open file of a client may cost a descriptor here: each block that is written does, and on the
daemon path each that is read. At the server's limit nobody could open a file. So the last
descriptors are kept for users that have few, and the very last for root.
"""

from typing import TYPE_CHECKING, Final

from kvfs.core.errors import TooManyOpen
from kvfs.machine.process_limits import clients_max

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT: Final = 0
#: Shares of what all clients may have: beyond the first only users with few get more, and beyond
#: the second only root.
_FOR_ALL: Final = 3 / 4
_FOR_USERS: Final = 7 / 8
#: A user below this share has few. As many such users as fit between the two shares above find
#: room, whatever others do.
_FEW: Final = 1 / 64


class OpenShares:
    """The handles of each user that cost a descriptor."""

    def __init__(self, share: float, ready_extents: int = 0) -> None:
        """Let each user but root have *share* of what clients may have (process_limits.py).

        *ready_extents*: the setting ``ready_extents_max``.
        """
        self._share: Final = share
        self._ready_extents: Final = ready_extents
        self._held: dict[int, int] = {}
        self._all = 0

    def require_one(self, uid: int, give_up_one: "Callable[[], bool]") -> None:
        """Raise TooManyOpen if user *uid* has its share, or all together have theirs.

        Before that, *give_up_one* closes a handle that is only kept for a next reader; False: none.
        """
        while not self._may_have_one(uid):
            if not give_up_one():
                raise TooManyOpen(f"uid {uid} has {self._held.get(uid, 0)} files open")

    def _may_have_one(self, uid: int) -> bool:
        most, held = clients_max(self._ready_extents), self._held.get(uid, 0)
        if uid == _ROOT:
            return self._all < most
        if held >= int(most * self._share) or self._all >= most * _FOR_USERS:
            return False
        return self._all < most * _FOR_ALL or held < most * _FEW

    def take(self, uid: int) -> None:
        """Count one for *uid*."""
        self._held[uid] = self._held.get(uid, 0) + 1
        self._all += 1

    def give_back(self, uid: int) -> None:
        """Count one less for *uid*."""
        self._all -= 1
        held = self._held[uid] - 1
        if held:
            self._held[uid] = held
        else:
            del self._held[uid]
