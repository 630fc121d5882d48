"""The old version of a block: what all but the writer see until the rewrite is whole.

O_TRUNC gives a final block's name to a fresh draft (truncating_open.py). Others who look the name
up meanwhile are led to the block that had it: readers never see a version grow. The index knows
nothing of this: a server that is killed, a writer that dies take both, and the name is a miss.
"""

from kvfs.core.lifecycle import UNFINISHED
from kvfs.core.types import InodeNo
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool


class OldVersions:
    """Blocks without a name that stand in for the drafts that took it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: By draft; None when the room was needed: then the name is a miss for others.
        self._kept: dict[InodeNo, OpenInode | None] = {}

    def __contains__(self, draft: InodeNo) -> bool:
        return draft in self._kept

    def keep(self, ino: InodeNo, draft: InodeNo, *, stands_in: bool) -> None:
        """Let what stood in for *ino*, about to lose its name, do so for *draft*, or *ino* itself.

        Called before ``Namespace.keep_removed`` of *ino*.
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

    def keep_nothing(self, draft: InodeNo) -> None:
        """The block that *draft* replaces had to go: a miss for others until the new is whole."""
        self._kept[draft] = None

    def of(self, draft: InodeNo) -> InodeNo | None:
        """Return the inode that others see in place of *draft*, None if they see nothing."""
        kept = self._kept[draft]
        return None if kept is None else kept.ino

    def stop_showing(self, opened: OpenInode) -> None:
        """*opened* has a name again: the one that it stood in for is a miss until it is whole."""
        if opened.stands_in:
            self._kept[opened.stands_in] = None
            self._let_go(opened)

    def _let_go(self, opened: OpenInode) -> None:
        opened.stands_in = InodeNo(0)
        self._pool.leave(opened, writer=False)

    def end(self, draft: InodeNo) -> None:
        """Show *draft* from now on: it is whole, or has no name any more."""
        kept = self._kept.pop(draft)
        if kept is not None:
            self._let_go(kept)

    def give_way(self) -> None:
        """Let the old blocks go: their room is needed."""
        for draft, kept in list(self._kept.items()):
            self._kept[draft] = None
            if kept is not None:
                self._let_go(kept)

    def tick(self) -> None:
        """End what was renamed or removed before its last close."""
        for draft in list(self._kept):
            record = self._pool.index.inode_or_miss(draft)
            if record is None or record.state not in UNFINISHED:
                self.end(draft)

    def close(self) -> None:
        """End everything: the pool stops."""
        for draft in list(self._kept):
            self.end(draft)
