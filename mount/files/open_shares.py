"""How many of the server's descriptors one user may take, so that some are left for others.

An open file of a client may cost a descriptor here: the extent of each block that is written, and
on the daemon path of each that is read. They end where the server's limit does, for everybody.
"""

import resource
from typing import TYPE_CHECKING, Final

from kvfs.core.errors import TooManyOpen

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT: Final = 0


class OpenShares:
    """The handles of each user that cost a descriptor; root may have any number."""

    def __init__(self, share: float) -> None:
        """Let each user have *share* of what the server may have open."""
        self._share: Final = share
        self._held: dict[int, int] = {}

    @property
    def most(self) -> int:
        """Return how many a user may have."""
        return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * self._share)

    def require_one(self, uid: int, give_up_one: "Callable[[], bool]") -> None:
        """Refuse one more to a user *uid* that has its share. Raises TooManyOpen.

        *give_up_one* closes what nobody uses and is kept for the next reader; False: there is none.
        """
        if uid == _ROOT:
            return
        while self._held.get(uid, 0) >= self.most:
            if not give_up_one():
                raise TooManyOpen(f"uid {uid} has {self._held[uid]} files open")

    def take(self, uid: int) -> None:
        """Count one for *uid*."""
        self._held[uid] = self._held.get(uid, 0) + 1

    def give_back(self, uid: int) -> None:
        """Count one less for *uid*."""
        held = self._held[uid] - 1
        if held:
            self._held[uid] = held
        else:
            del self._held[uid]
