"""Lookups that found nothing: which of them count as misses of the cache.

A miss is a client that asks for a block which is not there. The kernel asks more often:

- open(2) with O_CREAT and rename(2) look for the name themselves before they make it. The request
  that makes it follows at once.
- A name that the kernel still knows, but kvfs has evicted, is looked for twice: to see that it is
  old (fuse_dentry_revalidate in fs/fuse/dir.c), and anew.

So looks wait for a moment before they count. In other ways the kernel does not repeat a look: it
keeps what it was told for ``negative_timeout_s``.
"""

from collections.abc import Callable
from itertools import islice, takewhile
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
#: Looks that a tick counts: each may need some rows of the index, and requests wait meanwhile.
A_TICK: Final = 1024

Name = tuple[InodeNo, bytes]


class Looks:
    """Looks that found nothing a moment ago, oldest first."""

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        missed: Callable[[InodeNo, bytes], None],
        was_evicted: Callable[[InodeNo, bytes], bool],
    ) -> None:
        """*missed* is told of each look that counts: its directory and the name.

        *was_evicted* knows whether the name was evicted since it was missed last.
        """
        self._monotonic_s: Final = monotonic_s
        self._missed: Final = missed
        self._was_evicted: Final = was_evicted
        self._kernel_keeps = True
        #: When it was looked for last (s).
        self._waiting: dict[Name, float] = {}
        #: How often before that, if at all.
        self._before: dict[Name, int] = {}

    def apply(self, *, kernel_keeps: bool) -> None:
        """Take whether the kernel keeps that a name is missing (``negative_timeout_s``)."""
        self._kernel_keeps = kernel_keeps

    def add(self, parent: InodeNo, name: bytes) -> None:
        """A look for *name* in *parent* found nothing."""
        if name[-4:] == b".tmp":  # no block, and one of two looks of a store
            return
        waiting, key = self._waiting, (parent, name)
        if key in waiting:
            self._again(key)
        elif len(waiting) >= _WAITING_MAX:
            self._count(next(iter(waiting)))
        waiting[key] = self._monotonic_s()

    def _again(self, key: Name) -> None:
        """Note a further look for a name that waits, and make it the youngest of all."""
        del self._waiting[key]
        before = self._before.get(key, 0)
        if before or self._kernel_keeps or not self._was_evicted(*key):
            self._before[key] = before + 1

    def stored(self, parent: InodeNo, name: bytes, within_s: float) -> None:
        """A block gets the name: the last look was that of the same call, if *within_s*."""
        key = parent, name
        at_s = self._waiting.get(key)
        if at_s is None:
            return
        own = self._monotonic_s() - at_s <= within_s
        if own and not self._before:  # the usual case
            del self._waiting[key]
        else:
            self._count(key, last=not own)

    def made(self, parent: InodeNo, name: bytes) -> None:
        """Something else than a block gets the name: nobody looked for a block."""
        key = parent, name
        self._waiting.pop(key, None)
        self._before.pop(key, None)

    def settle(self, count_max: int = _WAITING_MAX) -> None:
        """Count those that have waited long enough, at most *count_max* of them."""
        until_s = self._monotonic_s() - RENAME_LOOK_S
        due = takewhile(lambda key: self._waiting[key] <= until_s, self._waiting)
        for key in list(islice(due, count_max)):
            self._count(key)

    def _count(self, key: Name, *, last: bool = True) -> None:
        """Count the looks for the name of *key*, the *last* one with them or not."""
        del self._waiting[key]
        looks = int(last)
        if self._before:
            looks += self._before.pop(key, 0)
        if looks and self._kernel_keeps:
            looks = 1
        for _ in range(looks):
            self._missed(*key)
