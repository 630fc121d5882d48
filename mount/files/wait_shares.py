"""How much each tenant has of what all requests that wait for room may hold.

One user's flood of waiting requests would use up what serves the others. So beyond a part of the
bound only those get more who have less than an equal share of that part; the one who has more is
told so, and nobody else is refused. The last of it is for root.
"""

from collections.abc import Callable
from typing import Final

from kvfs.core.account import ROOT, Taken
from kvfs.core.errors import NoSpace, OverShare
from kvfs.core.sizes import format_size

#: Up to this part of the bound nobody is refused, and up to the second one no user but for its own.
_WAITS_FREELY: Final = 3 / 4
_WAITS_BUT_ROOT: Final = 7 / 8


class WaitShares:
    """What waiting requests hold in memory, by tenant."""

    def __init__(self, waiting: Taken, bound_bytes: Callable[[], int]) -> None:
        """Count in *waiting*; all together may hold *bound_bytes*."""
        self._waiting: Final = waiting
        self._bound_bytes: Final = bound_bytes
        #: Requests that were refused because too many waited already.
        self.turned_away = 0

    def begin(self, uid: int, size_bytes: int) -> None:
        """Count a waiter of the tenant of *uid*, which holds *size_bytes*.

        Raises OverShare if it has its share, NoSpace if all together have theirs.
        """
        waiting, bound_bytes = self._waiting, self._bound_bytes()
        together_bytes, own_bytes = waiting.total + size_bytes, waiting.by(uid) + size_bytes
        may_bytes = bound_bytes * (1 if uid == ROOT else _WAITS_BUT_ROOT)
        if together_bytes > may_bytes:
            self._refuse(NoSpace(f"others that wait for room hold {format_size(waiting.total)}"))
        tenants = len(waiting.rows()) + (own_bytes == size_bytes)
        freely_bytes = bound_bytes * _WAITS_FREELY
        if uid != ROOT and together_bytes > freely_bytes and own_bytes > freely_bytes / tenants:
            self._refuse(
                OverShare(f"its requests that wait for room hold {format_size(own_bytes)}")
            )
        waiting.count(uid, size_bytes)

    def end(self, uid: int, size_bytes: int) -> None:
        """Count one less."""
        self._waiting.count(uid, -size_bytes)

    def _refuse(self, error: NoSpace | OverShare) -> None:
        self.turned_away += 1
        raise error
