"""A user's readers of a whole block share one handle, which is kept when the last of them closes.

File servers share another one, because their opens do not keep a block from eviction (served.py).

A load is an open, a read and a close, and most blocks are loaded again. What an open finds out
stays valid while the block's record is the same. So the next open only compares the record and is
counted.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.lifecycle import FINAL, State
from kvfs.core.records import inode_key
from kvfs.core.reuse import NOT_FOLLOWED
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.blocks.served import Served
from kvfs.engine.names.namespace import Proofs
from kvfs.engine.read_ahead import ReadAhead
from kvfs.pool.departures import RecentlyRemoved
from kvfs.pool.figures.cache_figures import CacheFigures
from kvfs.pool.open.open_inodes import OpenInode, OpenInodes
from kvfs.pool.pool import Pool
from kvfs.storage.heat import Heat
from kvfs.storage.index_transaction import RecordCache
from mount.files.handles import Handle, Handles
from mount.fuse.wire import ATTR_OUT_HEAD, OPEN_OUT, Grant


class Shared:
    """A handle, its block's record at the open, and the reply that the kernel got."""

    __slots__ = (
        "followed",
        "grant",
        "handle",
        "key",
        "opened",
        "record",
        "size_bytes",
        "tally",
        "told",
        "uid",
    )

    def __init__(
        self, handle: Handle, record: InodeRecord, grant: Grant, cache: CacheFigures, uid: int
    ) -> None:
        self.handle = handle
        #: The user of the requests that share it, who holds it (held_shares.py).
        self.uid = uid
        #: Where its loads are counted, and how much each loads.
        self.tally = cache.tally_of(handle.opened.ino, record)
        self.followed = cache.reuse.followed(record)
        self.size_bytes = record.size_bytes
        self.opened = handle.opened
        self.record = record
        #: Key of the record's row.
        self.key = inode_key(handle.opened.ino)
        self.grant = grant
        #: The same as struct fuse_open_out.
        self.told = OPEN_OUT.pack(handle.fh, grant.open_flags, grant.backing_id)


class Known(NamedTuple):
    """Where the compiled reader (mount/fuse/compiled_reader.pyx) looks, and where it counts."""

    shared: dict[InodeNo, Shared]
    most: int
    inodes: OpenInodes
    records: RecordCache
    heat: Heat
    handles: Handles
    loaded: Callable[[int], None]
    removed: RecentlyRemoved
    proofs: Proofs
    attributes_head: bytearray
    #: What is told of each open of a client, with its size in bytes, flags, uid and thread.
    opened: Callable[[InodeNo, int, int, int, int], None] | None
    not_followed: int = NOT_FOLLOWED


class SharedHandles:
    """The shared handles by inode.

    Invariant: if a shared handle has no open, its inode is parked (open_inodes.py).
    """

    def __init__(
        self,
        pool: Pool,
        handles: Handles,
        most: int,
        served: Served,
        proofs: Proofs,
        ahead: ReadAhead | None = None,
    ) -> None:
        """Share the handles of at most *most* inodes; *served* counts file servers' opens.

        *ahead* is told of those of others.
        """
        self._pool: Final = pool
        self._served: Final = served
        self._handles: Final = handles
        self._most: Final = most
        self._loaded: Final = pool.figures.reuse.loaded
        self._proofs: Final = proofs
        self._opened: Final = None if ahead is None else ahead.opened
        #: What begins an answer with attributes that the kernel may keep: for how long.
        self.attributes_head: Final = bytearray(ATTR_OUT_HEAD.size)
        #: Ids of threads of no file server, and of threads of one: their opens are counted apart.
        self.others: Final = pool.rules.leases.processes.servers.others
        self.servers: Final = pool.rules.leases.processes.servers.servers
        #: Oldest first.
        self._shared: dict[InodeNo, Shared] = {}
        #: What file servers share, on passthrough only: Ganesha opens a block for its attributes,
        #: and again to read it. Oldest first.
        self._by_servers: dict[InodeNo, Shared] = {}

    def known(self) -> Known:
        """Return all that ``enter`` and ``leave`` use, the same objects for ever."""
        pool = self._pool
        return Known(
            self._shared,
            self._most,
            pool.open.inodes,
            pool.index.records,
            pool.rules.heat,
            self._handles,
            self._loaded,
            pool.departures.removed,
            self._proofs,
            self.attributes_head,
            self._opened,
        )

    def enter(self, ino: InodeNo, flags: int, request: int, uid: int, tid: int) -> Shared | None:
        """Count *request* of *uid*'s thread *tid* as a reader on *ino*'s shared handle for *flags*.

        *flags* are those of open(2). Returns None if there is no such handle. Raises OSError, and
        counts nothing, if the index cannot be read.
        """
        shared = self._shared.get(ino)
        if shared is None or shared.handle.flags != flags or shared.uid != uid:
            return None
        pool = self._pool
        # Atomic: no checkpoint from the look at the record until the handle is counted.
        same = pool.index.still(shared.key, shared.record) or self._is_equal(shared)
        if same and pool.open.inodes.enter_again(shared.opened):
            self._count(ino, shared, request)
            if self._opened is not None:
                self._opened(ino, shared.size_bytes, flags, uid, tid)
            return shared
        self.forget(ino)
        return None

    def enter_served(
        self, ino: InodeNo, flags: int, request: int, _uid: int, _tid: int
    ) -> Shared | None:
        """Do the same for a file server, on the handle that servers share, for all their users.

        None beyond what servers may have open on passthrough, and while one of them may write.
        """
        pool, shared = self._pool, self._by_servers.get(ino)
        parked = pool.open.inodes.parked.get(ino)
        if parked is not None and self._served.must_ask(parked):
            self.forget(ino)  # otherwise the open would get its backing id
            return None
        if shared is None or shared.handle.flags != flags:
            return None
        opened = shared.opened
        if opened.quiet_writers or self._served.must_ask(opened):
            return None
        # Atomic, as above.
        same = pool.index.still(shared.key, shared.record) or self._is_equal(shared)
        if same and pool.open.inodes.enter_again(opened):
            self._served.opened(opened, writer=False, passing=True)
            self._count(ino, shared, request)
            return shared
        self.forget(ino)
        return None

    def _count(self, ino: InodeNo, shared: Shared, request: int) -> None:
        """Count one more open of *shared*, and one load."""
        self._pool.rules.heat.touch(ino)
        self._handles.share(shared.handle, request)
        tally = shared.tally
        tally.hits += 1
        tally.loaded_bytes += shared.size_bytes
        if shared.followed != NOT_FOLLOWED:
            self._loaded(shared.followed)

    def _is_equal(self, shared: Shared) -> bool:
        """Whether the record, read again, is the same as at the open."""
        record = self._pool.index.inode_or_miss(shared.opened.ino)
        if record is None or record != shared.record:
            return False
        shared.record = record
        return True

    def share(self, handle: Handle, grant: Grant, uid: int, tid: int) -> None:
        """Share *handle*, which *uid*'s thread *tid* has just opened to read, with its next opens.

        Only if its block is whole. File servers share one with each other. Not if the block has a
        timed lease (leases.py), which starts anew with each open.
        """
        opened = handle.opened
        record = self._pool.index.inode_or_miss(opened.ino)
        if record is not None and self._opened is not None and not handle.served:
            self._opened(opened.ino, record.size_bytes, handle.flags, uid, tid)
        if record is None or opened.writers or opened.through_daemon or opened.gone is not None:
            return
        if opened.quiet_writers:
            return  # each open must check whether one of them wrote again
        if record.state not in FINAL or (record.state == State.LEASED and not record.maker_tgid):
            return
        if handle.served and not grant.backing_id:
            return
        table = self._by_servers if handle.served else self._shared
        self._leave_table(table, opened.ino)
        if len(table) >= self._most:
            self.forget(next(iter(table)))
        table[opened.ino] = Shared(handle, record, grant, self._pool.figures, uid)

    def close(self, handle: Handle, request: int) -> bool:
        """Count one reader of *handle* less; True if there is nothing else to do.

        Otherwise the handle is closed, and the caller must close its inode. Raises BadHandle.
        """
        ino = handle.opened.ino
        if self.leave(ino, handle.fh, request):
            return True
        table = self._by_servers if handle.served else self._shared
        shared = table.get(ino)
        if shared is not None and shared.handle is handle:
            self._leave_table(table, ino)
        self._handles.close(handle.fh, request)
        return False

    def leave(self, ino: InodeNo, fh: int, request: int) -> bool:
        """Count one reader less on handle *fh* of *ino*; False if it does not stay shared.

        For callers that know only the number of the handle.
        """
        shared = self._shared.get(ino)
        if shared is None or shared.handle.fh != fh:
            return self._leave_served(ino, fh, request)
        handle, opened = shared.handle, shared.opened
        if not handle.opens:
            return False
        if opened.readers > 1 + opened.served_readers:
            self._pool.open.inodes.leave_one(opened)
        elif self._may_be_parked(opened):
            self._pool.open.inodes.park(opened)
        else:
            return False
        self._handles.leave(handle, request)
        return True

    def _leave_served(self, ino: InodeNo, fh: int, request: int) -> bool:
        """Do the same for a file server."""
        shared = self._by_servers.get(ino)
        if shared is None or shared.handle.fh != fh:
            return False
        handle, opened = shared.handle, shared.opened
        if not handle.opens or opened.quiet_writers:
            return False
        # Atomic: a parked inode has no users, file servers included.
        if handle.opens == 1 and not (
            opened.readers == 1 and self._may_be_parked(opened, leaving=True)
        ):
            return False
        self._served.closed(opened, writer=False, passing=True)
        if opened.readers == 1:
            self._pool.open.inodes.park(opened)
        else:
            self._pool.open.inodes.leave_one(opened)
        self._handles.leave(handle, request)
        return True

    def _may_be_parked(self, opened: OpenInode, *, leaving: bool = False) -> bool:
        """Whether *opened* can be parked at its last close, with its backing id.

        *leaving*: that close is a file server's. While more are open than ids may be kept, each
        close gives one back instead.
        """
        if opened.gone is not None or opened.fd >= 0 or opened.writers:
            return False
        if opened.served_readers != leaving:
            return False
        inodes = self._pool.open.inodes
        return len(inodes) + len(inodes.parked) <= self._most

    def forget(self, ino: InodeNo) -> None:
        """Give the handles of *ino* to no further opens; present readers use theirs to the end."""
        self._leave_table(self._shared, ino)
        self._leave_table(self._by_servers, ino)
        opened = self._pool.open.inodes.parked.pop(ino, None)
        if opened is not None:
            self._pool.kernel.freed(opened)

    def _leave_table(self, table: dict[InodeNo, Shared], ino: InodeNo) -> None:
        shared = table.pop(ino, None)
        if shared is not None and not shared.handle.opens:
            self._handles.forget(shared.handle)

    def give_up_one(self) -> bool:
        """Forget the parked inode that was unused longest; False if there is none."""
        for ino in self._pool.open.inodes.parked:
            self.forget(ino)
            return True
        return False
