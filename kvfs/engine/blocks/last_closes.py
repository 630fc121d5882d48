"""The last writer's close of a block, and closes that the index has not recorded yet.

close(2) has returned already, so a failure cannot be reported to the writer. A whole block must not
be lost because one write to the index failed. So it is tried again, and the name is removed only
if that keeps failing.
"""

import logging
from collections import deque
from typing import Final

from kvfs.core.errors import KvfsError
from kvfs.core.types import InodeNo
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.rewrite.findings import LockFiles
from kvfs.engine.rewrite.versions import OldVersions
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.open_notes import UNTOLD
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)
#: A block that could not be published in so many ticks in a row (two seconds) is given up.
_PUBLISH_TRIES: Final = 100


class LastCloses:
    """Carries out closes of writers; the last of an inode publishes."""

    def __init__(
        self, pool: Pool, publishing: Publishing, old: OldVersions, lock_files: LockFiles
    ) -> None:
        self._pool = pool
        self._publishing = publishing
        self._old = old
        self._lock_files = lock_files
        #: Blocks not published yet, and how often it was tried. The writer's handle still counts,
        #: so that size and times come from the extent.
        self._untold: deque[tuple[OpenInode, int]] = deque()

    def close(self, opened: OpenInode) -> None:
        """Close one writer's handle."""
        if opened.writers == 1 and not self._pool.settings.read_only:
            try:
                self._publishing.publish(opened)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x is not published yet: %s", opened.ino, error)
                self.take(opened)
                return
            if opened.ino in self._old:
                self._old.end(opened.ino)
        self._pool.leave(opened, writer=True)
        if opened.met and opened.writers == 1:
            self._lock_files.part(opened)

    def take(self, opened: OpenInode) -> None:
        """Keep the handle of the last writer of *opened*, which has closed it, for ``settle``."""
        self._untold.append((opened, 1))
        self._pool.open_notes.closes(opened, (UNTOLD,))

    def settle(self) -> None:
        """Try again to publish the waiting blocks; stop at the first that still cannot be."""
        while self._untold:
            opened, tries = self._untold.popleft()
            try:
                if opened.writers == 1:  # else the next close publishes
                    self._publishing.publish(opened)
            except (KvfsError, OSError) as error:
                if tries < _PUBLISH_TRIES or not self._publishing.dismiss(opened, error):
                    self._untold.append((opened, tries + 1))
                    return
            self._pool.leave(opened, writer=True)

    def forget_all(self) -> set[InodeNo]:
        """Empty the list; return the inodes that all writers have closed, for the stop."""
        closed = {opened.ino for opened, _ in self._untold if opened.writers == 1}
        self._untold.clear()
        return closed

    def end(self) -> bool:
        """Give up what could not be published; return False if there was any."""
        settled = not self._untold
        while self._untold:
            self._pool.leave(self._untold.popleft()[0], writer=True)
        return settled
