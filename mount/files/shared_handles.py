"""All readers of a whole block share one handle, which is kept when the last of them closes.

A load is an open, a read and a close, and most loads come again. What an open finds out about a
block holds as long as its record is the same, so the next one is a look at that, and a count.
"""

from typing import Final

from kvfs.core.lifecycle import IDENTIFIED, State
from kvfs.core.records import inode_key
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool
from mount.files.handles import Handle, Handles
from mount.fuse.grant import Grant
from mount.fuse.wire import OPEN_OUT


class Shared:
    """A handle, the record that its block had when it was opened, and what the kernel was told."""

    __slots__ = ("grant", "handle", "key", "opened", "record", "told")

    def __init__(self, handle: Handle, record: InodeRecord, grant: Grant) -> None:
        self.handle = handle
        self.opened = handle.opened
        self.record = record
        #: Of the record's row.
        self.key = inode_key(handle.opened.ino)
        self.grant = grant
        #: The same as struct fuse_open_out.
        self.told = OPEN_OUT.pack(handle.fh, grant.open_flags, grant.backing_id)


class SharedHandles:
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
        """Count one more reader on the handle of *ino* for open(2) *flags*, if there is one.

        Raises OSError: the index cannot be read; nothing is counted then.
        """
        shared = self._shared.get(ino)
        if shared is None or shared.handle.flags != flags:
            return None
        pool = self._pool
        # Atomic: no checkpoint from the look at the record until the handle is counted.
        same = pool.index.still(shared.key, shared.record) or self._is_equal(shared)
        if same and pool.open_inodes.enter_again(shared.opened):
            pool.heat.touch(ino)
            self._handles.share(shared.handle)
            return shared
        self.forget(ino)
        return None

    def _is_equal(self, shared: Shared) -> bool:
        """Whether the record is what it was, though it had to be read again."""
        record = self._pool.index.inode_or_miss(shared.opened.ino)
        if record is None or record != shared.record:
            return False
        shared.record = record
        return True

    def share(self, handle: Handle, grant: Grant) -> None:
        """Let *handle*, a reader's just opened, serve the next ones, if its block is whole.

        A lease by time starts anew with each open (leases.py), which takes the whole way.
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
        ino = handle.opened.ino
        if self.leave(ino, handle.fh):
            return True
        shared = self._shared.get(ino)
        if shared is not None and shared.handle is handle:
            self.forget(ino)
        self._handles.close(handle.fh)
        return False

    def leave(self, ino: InodeNo, fh: int) -> bool:
        """Count one reader less on the handle of *ino* if it is *fh* and stays shared, else False.

        A close by number, for who need not know the handle.
        """
        shared = self._shared.get(ino)
        if shared is None:
            return False
        handle, opened = shared.handle, shared.opened
        if handle.fh != fh or not handle.opens:
            return False
        if opened.readers > 1:
            opened.readers -= 1
        elif self._may_be_parked(opened):
            self._pool.open_inodes.park(opened)
        else:
            return False
        self._handles.leave(handle)
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
