"""Which lookups that found nothing are misses of the cache.

A miss is a client that asks for a block that is not there. But the kernel sends more lookups:

- open(2) with O_CREAT and rename(2) look the name up before they create it. The request that
creates it follows at once.
- A name that the kernel has cached, but kvfs has evicted, is looked up twice: to revalidate it
(fuse_dentry_revalidate in fs/fuse/dir.c), and again.

So a lookup waits for a moment before it counts (``Looks``). Otherwise the kernel does not repeat a
lookup: it caches the answer for ``negative_timeout_s``.
"""

from collections.abc import Callable
from itertools import islice, takewhile
from typing import Final

from kvfs.core.types import InodeNo

#: The longest time between the lookup and the RENAME of one system call, on a machine that is short
#: of CPU. The kernel sends that lookup even if it has cached that the name is missing
#: (fuse_dentry_revalidate in fs/fuse/dir.c), so it is never a client's own, earlier lookup.
RENAME_LOOK_S: Final = 1.0
#: The same for a CREATE, before which the kernel may send no lookup. Then the last one is the
#: client's own; but the client computes the block in between, which takes longer than this.
CREATE_LOOK_S: Final = 0.1
#: Most lookups that wait; for one more the oldest counts at once.
_WAITING_MAX: Final = 4096
#: Most lookups that a tick counts: each may read some index rows, and requests wait meanwhile.
A_TICK: Final = 1024
Name = tuple[InodeNo, bytes]


class Looks:
    """Lookups ("looks") that found nothing a moment ago, oldest first."""

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        missed: Callable[[InodeNo, bytes], None],
        was_evicted: Callable[[InodeNo, bytes], bool],
    ) -> None:
        """*missed* is called for each look that counts, with its directory and name.

        *was_evicted* returns whether the name was evicted since it was last missed.
        """
        self._monotonic_s: Final = monotonic_s
        self._missed: Final = missed
        self._was_evicted: Final = was_evicted
        self._kernel_keeps = True
        #: When each name was last looked up (s, monotonic).
        self._waiting: dict[Name, float] = {}
        #: How many further looks for the name wait, if any.
        self._before: dict[Name, int] = {}

    def apply(self, *, kernel_keeps: bool) -> None:
        """Set whether the kernel caches that a name is missing (``negative_timeout_s``)."""
        self._kernel_keeps = kernel_keeps

    def add(self, parent: InodeNo, name: bytes) -> None:
        """A LOOKUP of *name* in *parent* found nothing."""
        if name[-4:] == b".tmp":  # not a block, and one of the two looks of a store
            return
        waiting, key = self._waiting, (parent, name)
        if key in waiting:
            self._again(key)
        elif len(waiting) >= _WAITING_MAX:
            self._count(next(iter(waiting)))
        waiting[key] = self._monotonic_s()

    def _again(self, key: Name) -> None:
        """Note another look for a waiting name, which becomes the youngest."""
        del self._waiting[key]
        before = self._before.get(key, 0)
        if before or self._kernel_keeps or not self._was_evicted(*key):
            self._before[key] = before + 1

    def stored(self, parent: InodeNo, name: bytes, within_s: float) -> None:
        """A block gets the name. A look at most *within_s* ago belonged to the same system call."""
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
        """Something other than a block gets the name: its looks were not for a block."""
        key = parent, name
        self._waiting.pop(key, None)
        self._before.pop(key, None)

    def settle(self, count_max: int = _WAITING_MAX) -> None:
        """Count looks that have waited long enough, at most *count_max* of them."""
        until_s = self._monotonic_s() - RENAME_LOOK_S
        due = takewhile(lambda key: self._waiting[key] <= until_s, self._waiting)
        for key in list(islice(due, count_max)):
            self._count(key)

    def _count(self, key: Name, *, last: bool = True) -> None:
        """Count the looks for the name of *key*; the *last* one may be left out."""
        del self._waiting[key]
        looks = int(last)
        if self._before:
            looks += self._before.pop(key, 0)
        if looks and self._kernel_keeps:
            looks = 1
        for _ in range(looks):
            self._missed(*key)
