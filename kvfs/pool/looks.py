"""Lookups that found nothing: which of them count as misses of the cache.

open(2) with O_CREAT and rename(2) look for the name themselves before they make it. Such a look is
no miss, and the request that makes the name follows it at once. So a look waits for a moment before
it counts. The kernel keeps what it was told (``negative_timeout_s``), and asks nothing meanwhile.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import Final

from kvfs.core.types import InodeNo

#: The longest between the look and the RENAME of one system call, on a machine that is short of
#: CPU. The kernel takes that look even if it knows that there is no such name
#: (fuse_dentry_revalidate in fs/fuse/dir.c), so an earlier look of a client is told from it.
RENAME_LOOK_S: Final = 1.0
#: The same for a CREATE, before which the kernel need not look. So a client's own look may be the
#: only one; but the client computes the block in between, which takes longer.
CREATE_LOOK_S: Final = 0.1
#: Looks that wait; the oldest of more count at once.
_WAITING_MAX: Final = 4096

Name = tuple[InodeNo, bytes]


class Looks:
    """Looks that found nothing a moment ago, oldest first."""

    def __init__(
        self, monotonic_s: Callable[[], float], missed: Callable[[InodeNo, bytes], None]
    ) -> None:
        """*missed* is told of each look that counts: its directory and the name."""
        self._monotonic_s: Final = monotonic_s
        self._missed: Final = missed
        #: When it was looked for last, and how often before.
        self._waiting: dict[Name, tuple[float, int]] = {}

    def add(self, parent: InodeNo, name: bytes) -> None:
        """A look for *name* in *parent* found nothing."""
        waiting, key = self._waiting, (parent, name)
        before = waiting.pop(key, None)
        if len(waiting) >= _WAITING_MAX:
            self._count(next(iter(waiting)))
        waiting[key] = self._monotonic_s(), 0 if before is None else before[1] + 1

    def stored(self, parent: InodeNo, name: bytes, within_s: float) -> None:
        """A block gets the name: the last look was that of the same call, if *within_s*."""
        look = self._waiting.get((parent, name))
        if look is not None:
            at_s, before = look
            own = self._monotonic_s() - at_s <= within_s
            self._count((parent, name), before if own else before + 1)

    def made(self, parent: InodeNo, name: bytes) -> None:
        """Something else than a block gets the name: nobody looked for a block."""
        self._waiting.pop((parent, name), None)

    def settle(self) -> None:
        """Count those that have waited long enough."""
        until_s = self._monotonic_s() - RENAME_LOOK_S
        due = takewhile(lambda key: self._waiting[key][0] <= until_s, self._waiting)
        for key in list(due):
            self._count(key)

    def _count(self, key: Name, looks: int | None = None) -> None:
        """Count *looks* for the name of *key*, or else all of them."""
        _, before = self._waiting.pop(key)
        for _ in range(before + 1 if looks is None else looks):
            self._missed(*key)
