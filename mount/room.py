"""Waiting for room: what a handler does that finds the pool full while something may still go.

Every wait has a bound, and none begins when nothing may go.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import trio

from kvfs.errors import NoSpace
from kvfs.store import Store

#: A scan of a million rows takes 20 ms, an unlink of a large extent as long.
_LOOK_S: Final = 0.002
#: What was closed just now may still count as open: names of what is in use go only after this.
_PATIENCE_S: Final = 0.05
#: Who has read a block for long after its name went keeps it: for such nobody waits longer.
_LAST_USER_S: Final = 1.0
#: How often to try on one that others fill as fast as room is made.
DEVICE_TRIES: Final = 3


class _Patience(NamedTuple):
    """How long to wait for those who read what may go."""

    longest_s: float
    #: After somebody else waited in vain.
    in_vain_s: float


_USUAL: Final = _Patience(math.inf, _PATIENCE_S)
#: A CREATE waits with its directory locked, and all who look a name up there wait with it: no
#: longer than a usual load takes, and not one after the other.
_CREATES: Final = _Patience(0.2, 0.0)


def _go_on() -> None:
    """Stand in where nothing was done before the wait."""


class Room:
    """Counts who waited, and how long."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.stalls = 0
        self.stalled_s = 0.0
        self.longest_s = 0.0
        #: Until then nobody begins to wait for users who outstayed another one's patience.
        self._vain_until_s = {_USUAL: 0.0, _CREATES: 0.0}

    async def find(
        self, size_bytes: int, about_to_wait: Callable[[], Callable[[], None]] = lambda: _go_on
    ) -> None:
        """Return with *size_bytes* of room, at once if there is some, else waiting for it.

        *about_to_wait* is as in ``Files``. Raises NoSpace when nothing is left that may go, or
        after the setting ``room_wait_s``.
        """
        await self._find(size_bytes, about_to_wait, _USUAL)

    async def find_to_create(self, about_to_wait: Callable[[], Callable[[], None]]) -> None:
        """Return when a draft may be made: there is room, or others read what may go.

        It asks again with its first bytes. Raises NoSpace when nothing is left that may go.
        """
        try:
            await self._find(1, about_to_wait, _CREATES)
        except NoSpace:
            if not self._store.reclaim.awaits_users:
                raise

    async def _find(
        self,
        size_bytes: int,
        about_to_wait: Callable[[], Callable[[], None]],
        patience: _Patience,
    ) -> None:
        try:
            self._store.pool.require_space(size_bytes)
        except NoSpace:
            if not self.worth_waiting(size_bytes, 0.0):
                raise
            resume = about_to_wait()
            try:
                await self._make(size_bytes, patience)
            finally:
                resume()  # no checkpoint: the room is the caller's

    def worth_waiting(self, size_bytes: int, waited_s: float, users_s: float = math.inf) -> bool:
        """Whether *size_bytes* of room may come for somebody who waited so long already.

        For those who read what may go, *users_s* at most.
        """
        reclaim, pool = self._store.reclaim, self._store.pool
        longest_s = pool.settings.room_wait_s
        may_go = reclaim.hopeful or (not waited_s and pool.evictable_bytes)
        if may_go or pool.space.fits_but_for_guesses(size_bytes):
            return waited_s < longest_s
        if waited_s >= users_s:
            return False
        if waited_s < _LAST_USER_S:
            return reclaim.awaits_users
        return waited_s < longest_s and reclaim.users_came_lately(longest_s)

    async def _make(self, size_bytes: int, patience: _Patience) -> None:
        """Wait for *size_bytes* of room; no checkpoint comes between finding it and returning."""
        pool, reclaim = self._store.pool, self._store.reclaim
        start_s = trio.current_time()
        # One after the other they would hold up all others who want room, for a second each.
        in_vain = start_s < self._vain_until_s[patience]
        self.stalls += 1
        try:
            while True:
                await trio.sleep(_LOOK_S)
                pool.background.work(_LOOK_S / 2)  # a scan or unlinks that we wait for
                reclaim.search_anew()
                try:
                    pool.require_space(size_bytes)
                except NoSpace:
                    waited_s = trio.current_time() - start_s
                    if waited_s > _PATIENCE_S and not reclaim.planning:
                        reclaim.evict_used(size_bytes - pool.space.unclaimed_bytes)
                    outstayed = in_vain and waited_s > patience.in_vain_s and not reclaim.hopeful
                    longest_s = patience.longest_s
                    if outstayed or not self.worth_waiting(size_bytes, waited_s, longest_s):
                        if not in_vain:
                            self._vain_until_s[patience] = trio.current_time() + waited_s
                        raise
                else:
                    return
        finally:
            waited_s = trio.current_time() - start_s
            self.stalled_s += waited_s
            self.longest_s = max(self.longest_s, waited_s)
