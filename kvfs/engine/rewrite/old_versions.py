"""The old version of a block: what all but the writer see until the rewrite is whole.

O_TRUNC gives a final block's name to a fresh draft (truncating_open.py). Other processes that look
the name up meanwhile are led to the old block, so that readers never see a version grow. The index
does not record this. If the server is killed or the writer dies, both versions are lost: the name
is a miss.
"""

from typing import Final

from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.types import InodeNo
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

_OLD_NOTE: Final = b"rewrite/old"


class OldVersions:
    """Blocks without a name, shown in place of the drafts that took it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: Old blocks by draft; None if the space was needed: then the name is a miss for others.
        self._kept: dict[InodeNo, OpenInode | None] = {}

    def __contains__(self, draft: InodeNo) -> bool:
        return draft in self._kept

    def keep(self, ino: InodeNo, draft: InodeNo, *, stands_in: bool) -> None:
        """Show an old version for *draft*, which takes the name of *ino*.

        It is what was shown for *ino* so far, or *ino* itself if it *stands_in*. Call it before
        ``Namespace.keep_removed`` of *ino*.
        """
        kept: OpenInode | None = None
        if ino in self._kept:
            kept = self._kept.pop(ino)
        elif stands_in:
            kept = self._pool.open_inodes.enter(ino, writer=False)
        else:
            return
        self._kept[draft] = kept
        if kept is not None:
            kept.stands_in = draft
        self._note()

    def keep_nothing(self, draft: InodeNo) -> None:
        """Note that the block replaced by *draft* is gone: others miss until the draft is whole."""
        self._kept[draft] = None
        self._note()

    def _note(self) -> None:
        """Note all of them, for a server that takes the mount over."""
        rows = [(draft, 0 if kept is None else kept.ino) for draft, kept in self._kept.items()]
        self._pool.notes.put(_OLD_NOTE, rows)

    def recall(self) -> None:
        """Show the noted old versions again. Without one, the draft is a miss until it is whole."""
        rows = self._pool.notes.get(_OLD_NOTE) or []
        for draft, ino in rows:
            if not self._pool.index.knows(draft):
                continue
            kept, pool = None, self._pool
            if ino and not pool.index.knows(ino):
                kept = pool.open_notes.enter(pool.open_inodes, pool.space, ino)
            if kept is not None:
                kept.stands_in = draft
            self._kept[draft] = kept

    def of(self, draft: InodeNo) -> InodeNo | None:
        """Return the inode that others see in place of *draft*, None if they see nothing."""
        kept = self._kept[draft]
        return None if kept is None else kept.ino

    def stop_showing(self, opened: OpenInode) -> None:
        """Note that *opened* has a name again: its draft is a miss for others until it is whole."""
        if opened.stands_in:
            self._kept[opened.stands_in] = None
            self._note()
            self._let_go(opened)

    def _let_go(self, opened: OpenInode) -> None:
        opened.stands_in = InodeNo(0)
        self._pool.leave(opened, writer=False)

    def end(self, draft: InodeNo) -> None:
        """Show *draft* itself from now on, because it is whole or has lost its name.

        Nothing happens if it is shown already.
        """
        if draft not in self._kept:
            return
        kept = self._kept.pop(draft)
        self._note()
        if kept is not None:
            self._let_go(kept)

    def may_go(self) -> list[OpenInode]:
        """Return what ``give_way`` lets go."""
        return [kept for kept in self._kept.values() if kept is not None]

    def give_way(self) -> None:
        """Give up the old blocks, because their space is needed."""
        for draft, kept in list(self._kept.items()):
            self._kept[draft] = None
            self._note()
            if kept is not None:
                self._let_go(kept)

    def tick(self) -> None:
        """End old versions whose draft was renamed or removed before its last close."""
        for draft in list(self._kept):
            record = self._pool.index.inode_or_miss(draft)
            if record is None or record.state not in UNFINISHED:
                self.end(draft)

    def close(self) -> None:
        """Give up all, because the pool stops."""
        for draft in list(self._kept):
            self.end(draft)
