"""The limit of all leases, and which process is refused when it is reached.

A lease ends with its process, so one process that goes on storing could take the whole pool. Above
the limit each user has a share of it, and each process of a user a part of that share. Only a
process over its part, whose user is over the share, is refused: forking gains nothing, and no
process is refused for what another one holds. Blocks stored above the limit (begun before, by other
processes, under temporary names) get a lease until they fill half of what the limit leaves. After
that they are published without one.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.machine.processes import Maker

#: Parts of the space beyond the limit that leases may take: for users over their share (stores
#: under way, and stores of their other processes), and for all users together.
_UNDER_WAY_SHARE: Final = 1 / 4
_OTHERS_SHARE: Final = 1 / 2


class Lessee(NamedTuple):
    """The process with the most leases, in bytes; pid 0 stands for all that cannot be watched."""

    maker: Maker
    held_bytes: int


class LeaseShares:
    """The bytes that leases hold, by user and process."""

    def __init__(self, bound_bytes: Callable[[], int], whole_bytes: Callable[[], int]) -> None:
        """*bound_bytes* returns how much of *whole_bytes*() leases may keep now, 0 or more."""
        self._bound_bytes = bound_bytes
        self._whole_bytes = whole_bytes
        self._by_user: dict[int, dict[Maker, int]] = {}
        self.held_bytes = 0
        #: Stores that were refused.
        self.refused = 0

    @property
    def bound_bytes(self) -> int:
        """How much leases may keep now."""
        return self._bound_bytes()

    def count(self, uid: int, maker: Maker, change_bytes: int) -> None:
        """Count *change_bytes* more, or less if negative, for *maker* of user *uid*."""
        self.held_bytes += change_bytes
        makers = self._by_user.setdefault(uid, {})
        makers[maker] = makers.get(maker, 0) + change_bytes
        if not makers[maker]:
            del makers[maker]
        if not makers:
            del self._by_user[uid]

    def refuses(self, uid: int, maker: Maker) -> bool:
        """Whether the next store of *maker* under a final name is refused."""
        bound_bytes = self._bound_bytes()
        return self.held_bytes > bound_bytes and self._is_over(uid, maker, bound_bytes)

    def gives(self, uid: int, size_bytes: int) -> bool:
        """Whether user *uid* gets a lease for *size_bytes* just stored."""
        bound_bytes = self._bound_bytes()
        lacking_bytes = self.held_bytes + size_bytes - bound_bytes
        if lacking_bytes <= 0:
            return True
        # A part of the space beyond the limit.
        is_over = self._is_user_over(uid, bound_bytes)
        share = _UNDER_WAY_SHARE if is_over else _OTHERS_SHARE
        return lacking_bytes <= share * (self._whole_bytes() - bound_bytes)

    def _is_user_over(self, uid: int, bound_bytes: int) -> bool:
        held_bytes = sum(self._by_user.get(uid, {}).values())
        return held_bytes > 0 and held_bytes >= bound_bytes / len(self._by_user)

    def _is_over(self, uid: int, maker: Maker, bound_bytes: int) -> bool:
        if not self._is_user_over(uid, bound_bytes):
            return False
        makers = self._by_user[uid]
        part_bytes = bound_bytes / len(self._by_user) / len(makers)
        return makers.get(maker, 0) >= max(1, part_bytes)

    def most(self) -> Lessee | None:
        """Return the process with the most leases, None if there are none."""
        held: dict[Maker, int] = {}
        for makers in self._by_user.values():
            for maker, size_bytes in makers.items():
                held[maker] = held.get(maker, 0) + size_bytes
        if not held:
            return None
        maker = max(held, key=lambda each: held[each])
        return Lessee(maker, held[maker])
