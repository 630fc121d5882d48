"""The last close of a block by a writer: it publishes, at once or with the rename that follows.

A store closes its file under a temporary name, and renames it right after. Both are one change of
the index: the close waits for the rename, for a tick at most. Until then the block is a draft that
all may see, with the writer's handle counted, so that its size and times come from the extent.
Whoever opens or changes it meanwhile has it published first.

close(2) has returned already, so a failure cannot be reported to the writer. A whole block must not
be lost because one write to the index failed. So it is tried again, and the name is removed only
if that keeps failing.
"""

import logging
from typing import Final

from kvfs.core.errors import KvfsError
from kvfs.core.lifecycle import UNFINISHED, is_temporary
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.rewrite.findings import LockFiles
from kvfs.engine.rewrite.versions import OldVersions
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.open_notes import UNTOLD
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: A block that could not be published in so many ticks in a row (two seconds) is given up.
_PUBLISH_TRIES: Final = 100
#: If more closes wait for a rename, the oldest is published. A writer renames right after its
#: close, so as many writers would have to be between the two.
_AWAITED_MAX: Final = 256


class LastCloses:
    """Carries out closes of writers; the last of an inode publishes. Implements ``Closes``."""

    def __init__(
        self, pool: Pool, publishing: Publishing, old: OldVersions, lock_files: LockFiles
    ) -> None:
        self._pool = pool
        self._publishing = publishing
        self._old = old
        self._lock_files = lock_files
        #: Blocks that are closed and not published yet, and how often that was tried, oldest
        #: first. The writer's handle still counts.
        self._untold: dict[InodeNo, tuple[OpenInode, int]] = {}

    def close(self, opened: OpenInode, *, awaits_rename: bool = False) -> None:
        """Close one writer's handle; if it *awaits_rename*, the next tick may publish the block."""
        if opened.writers == 1 and not self._pool.settings.read_only:
            if opened.settling:  # until then its extent does not say what it is
                self._pool.open.notes.closes(opened, (UNTOLD,))
                self._pool.background.device.after_all(lambda: self.close(opened))
                return
            if awaits_rename and self._may_await(opened):
                self.put_off(opened)
                opened.await_rename()
                if len(self._untold) > _AWAITED_MAX:
                    self.publish_now(next(iter(self._untold)))
                return
            try:
                self._publishing.publish(opened)
            except (KvfsError, OSError) as error:
                _log.warning("inode %#x is not published yet: %s", opened.ino, error)
                self.put_off(opened)
                return
            if opened.ino in self._old:
                self._old.end(opened.ino)
        self._pool.departures.leave(opened, writer=True)
        if opened.met and opened.writers == 1:
            self._lock_files.part(opened)

    def take_back(self, opened: OpenInode, *, appends: bool) -> None:
        """Close a writer's handle that no client received, once the device has done its work.

        Of a draft that was made for it nothing stays. Nothing is noted: a server that takes over
        finds no handle, and does the same.
        """

        device = self._pool.background.device

        def close() -> None:
            if opened.settling:
                device.after_all(close)
                return
            if opened.writers == 1:  # else it is another's, who may write it whole
                opened.spoil()
            self.close(opened)

        if appends:
            opened.stop_appending()
        device.after_all(close)

    def _may_await(self, opened: OpenInode) -> bool:
        """Whether *opened* is a whole draft under a temporary name, and nothing is special."""
        if not opened.is_plain_draft or opened.gone is not None or opened.fd < 0:
            return False
        if opened.readers or opened.served_writers or opened.ino in self._old:
            return False
        record = self._pool.index.inode_or_miss(opened.ino)
        return record is not None and record.state in UNFINISHED and is_temporary(record.name)

    def put_off(self, opened: OpenInode) -> None:
        """Keep the handle of the last writer of *opened*, which has closed it, for ``settle``."""
        self._untold[opened.ino] = (opened, 1)
        self._pool.open.notes.closes(opened, (UNTOLD,))

    # ---- the port Closes: what a rename asks for ----

    def closed(self, opened: OpenInode, record: InodeRecord) -> InodeRecord | None:
        """Return what the close that waits makes of *record*, for the rename that follows it.

        None: no close waits, or it leads to no whole block. Nothing is published yet.
        """
        if not opened.awaits_rename or opened.writers != 1 or opened.ino not in self._untold:
            return None
        if opened.settling:
            return None
        return self._publishing.finished(opened, record)

    def published(self, opened: OpenInode, growth_bytes: int) -> None:
        """Note that the rename has published *opened*, which takes *growth_bytes* more now."""
        del self._untold[opened.ino]
        opened.await_no_rename()
        self._publishing.end(opened, growth_bytes)
        self._pool.departures.leave(opened, writer=True)

    # ---- everybody else ----

    def publish_now(self, ino: InodeNo) -> None:
        """Publish *ino* if its close waits: somebody else is about to use or change it."""
        if ino in self._untold:
            self._publish(ino)

    def settle(self) -> None:
        """Publish the waiting blocks; stop at the first that still cannot be."""
        while self._untold and self._publish(next(iter(self._untold))):
            pass

    def _publish(self, ino: InodeNo) -> bool:
        """Publish *ino*, whose close waits; False if that has failed, and is to be tried again."""
        opened, tries = self._untold.pop(ino)
        opened.await_no_rename()
        try:
            if opened.writers == 1:  # else the next close publishes
                self._publishing.publish(opened)
        except (KvfsError, OSError) as error:
            if tries < _PUBLISH_TRIES or not self._publishing.dismiss(opened, error):
                self._untold[ino] = (opened, tries + 1)
                return False
        self._pool.departures.leave(opened, writer=True)
        return True

    def forget_all(self) -> set[InodeNo]:
        """Empty the list; return the inodes that all writers have closed, for the stop."""
        closed = {ino for ino, (opened, _) in self._untold.items() if opened.writers == 1}
        self._untold.clear()
        return closed

    def end(self) -> bool:
        """Give up what could not be published; return False if there was any."""
        settled = not self._untold
        while self._untold:
            opened, _ = self._untold.pop(next(iter(self._untold)))
            self._pool.departures.leave(opened, writer=True)
        return settled
