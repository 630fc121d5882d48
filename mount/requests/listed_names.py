"""Remembers what a listing has just shown a file server, which then looks up each of the names.

NFS-Ganesha reads some rows of a directory and then looks up each of their names, on one thread
(read_dirents in FSAL_VFS/handle.c of 4.3). If one of them is gone, it gives up the whole listing
with that error, and so does its client. In a full pool a name may be evicted at any time. So for a
moment a thread still finds each name that it was just shown, as it was then.
"""

import time
from typing import Final, Generic, TypeVar

from kvfs.core.rewriting import Kept, Recent
from kvfs.core.types import InodeNo

#: A server looks the names up at once, but on a busy machine a page of them has taken seconds. One
#: that is too slow for this may fail, as without it.
_SHOWN: Final = Kept("which rows of a directory a file server's thread was shown", 5.0, 256)
#: Rows of one answer to a READDIR that are remembered: more than a page holds.
_ROWS_MAX: Final = 256

#: What the kernel was told of a name.
_Row = TypeVar("_Row")


class ListedNames(Generic[_Row]):
    """The rows that each thread of a file server was shown last."""

    def __init__(self) -> None:
        self._shown: Recent[int, tuple[InodeNo, dict[bytes, _Row]]] = Recent(_SHOWN)
        #: Whether a file server has listed anything since the start.
        self.in_use = False

    def note(self, thread: int, directory: InodeNo, rows: dict[bytes, _Row]) -> None:
        """Note that *thread* was just shown *rows* of *directory*."""
        if rows and thread > 0:  # 0: any thread of another pid namespace
            self.in_use = True
            rows = dict(list(rows.items())[:_ROWS_MAX])
            self._shown.remember(thread, (directory, rows), time.monotonic())

    def find(self, thread: int, directory: InodeNo, name: bytes) -> _Row | None:
        """Return what *thread* was shown under *name* a moment ago; None if it was not."""
        shown = self._shown.of(thread, time.monotonic())
        if shown is None or shown[0] != directory:
            return None
        return shown[1].get(name)
