"""Readers of a whole block share one handle, which is kept when the last of them closes.

A load is an open, a read and a close, and most loads come again. What an open finds out about a
block holds as long as its record is the same, so the next one is a look at that, and a count.
"""

from typing import Final, NamedTuple

from kvfs.lifecycle import IDENTIFIED, State
from kvfs.open_inodes import OpenInode
from kvfs.pool import Pool
from kvfs.types import InodeNo, InodeRecord
from mount.grant import Grant
from mount.handles import Handle, Handles


class Shared(NamedTuple):
    """A handle, the record that its block had when it was opened, and what the kernel was told."""

    handle: Handle
    record: InodeRecord
    grant: Grant


class Readers:
    """The shared handles by inode.

    Invariant: of one without an open the inode is parked (open_inodes.py), or it will not serve.
    """

    def __init__(self, pool: Pool, handles: Handles, most: int) -> None:
        """Share the handles of at most *most* inodes."""
        self._pool: Final = pool
        self._handles: Final = handles
        self._most: Final = most
        #: Oldest first.
        self._shared: dict[InodeNo, Shared] = {}

    def enter(self, ino: InodeNo, flags: int) -> Shared | None:
        """Count one more reader on the handle of *ino* for open(2) *flags*, if there is one."""
        shared = self._shared.get(ino)
        if shared is None:
            return None
        handle = shared.handle
        if handle.flags != flags:
            return None
        pool = self._pool
        # Atomic: no checkpoint from the look at the record until the handle is counted.
        record = pool.index.inode_or_miss(ino)
        same = record is shared.record or record == shared.record
        if same and pool.open_inodes.enter_again(handle.opened):
            pool.heat.touch(ino)
            self._handles.share(handle)
            return shared
        self.forget(ino)
        return None

    def share(self, handle: Handle, grant: Grant) -> None:
        """Let *handle*, a reader's just opened, serve the next ones, if its block is whole.

        A lease by time starts anew with each open (holdings.py), which takes the whole way.
        """
        opened = handle.opened
        record = self._pool.index.inode_or_miss(opened.ino)
        if record is None or opened.writers or opened.through_daemon or opened.gone is not None:
            return
        if record.state not in IDENTIFIED or (
            record.state == State.LEASED and not record.maker_tgid
        ):
            return
        self.forget(opened.ino)
        if len(self._shared) >= self._most:
            self.forget(next(iter(self._shared)))
        self._shared[opened.ino] = Shared(handle, record, grant)

    def close(self, handle: Handle) -> bool:
        """Count one reader on *handle* less; True if that is all that there is to do.

        Else the handle is closed, and its inode is still to be. Raises BadHandle.
        """
        opened = handle.opened
        shared = self._shared.get(opened.ino)
        is_shared = shared is not None and shared.handle is handle
        if is_shared and opened.readers == 1 and not self._may_be_parked(opened):
            self.forget(opened.ino)
            is_shared = False
        if not is_shared:
            self._handles.close(handle.fh)
            return False
        self._handles.leave(handle)
        if opened.readers > 1:
            opened.readers -= 1
        else:
            self._pool.open_inodes.park(opened)
        return True

    def _may_be_parked(self, opened: OpenInode) -> bool:
        """Whether nothing is left to be done at the last close of *opened*, its id included.

        While more are open than ids may be kept, each close gives one back.
        """
        if opened.gone is not None or opened.fd >= 0 or opened.writers:
            return False
        inodes = self._pool.open_inodes
        return len(inodes) + len(inodes.parked) <= self._most

    def forget(self, ino: InodeNo) -> None:
        """Share no handle of *ino* any more; who has one keeps it to his close."""
        shared = self._shared.pop(ino, None)
        if shared is not None and not shared.handle.opens:
            self._handles.forget(shared.handle)
        opened = self._pool.open_inodes.parked.pop(ino, None)
        if opened is not None:
            self._pool.freed(opened)

    def give_up_one(self) -> bool:
        """Forget the parked inode that was unused for longest; False if there is none."""
        for ino in self._pool.open_inodes.parked:
            self.forget(ino)
            return True
        return False
