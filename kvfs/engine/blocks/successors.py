"""Successors: a block in memory that the kernel reads gets another inode, on its drive.

On passthrough an inode has one extent in the kernel until all have closed it (fs/fuse/iomode.c). So
such a block cannot leave memory, and a writer beside its readers would let it grow there without
asking. Its bytes are copied into a fresh inode on the drive, which gets name, attributes, times,
lease and heat. Who has it open keeps the old one, as if a client had renamed a copy over it; the
next open gets the new one. A server that is killed before that leaves a file that no name leads to.
"""

import functools
import os
from collections.abc import Callable

from kvfs.core.changed import Why
from kvfs.core.errors import DeadInode, NotAtHand
from kvfs.core.lifecycle import SETTLED
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.engine.names.namespace import Namespace
from kvfs.engine.names.tree_change import TreeChange, alias_record
from kvfs.machine.file_holders import is_locked
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool


class Successors:
    """Gives blocks of one pool their successors."""

    def __init__(self, pool: Pool, namespace: Namespace, allocator: Allocator) -> None:
        self._pool = pool
        self._namespace = namespace
        self._allocator = allocator
        #: Blocks that got one, and what these hold.
        self.moved = self.moved_bytes = 0

    def require_writable(self, ino: InodeNo) -> None:
        """Raise NotAtHand if *ino* is to have a successor before it is opened to write.

        Raises DeadInode if its name leads to that, or if it has none any more; NoSpace.
        """
        opened = self._pool.open.inodes.get(ino)
        if opened is None or not self._is_kernels(opened) or opened.stands_in:
            return
        record = None if opened.gone is not None else self._pool.index.inode_or_miss(ino)
        if record is None or record.state not in SETTLED:
            raise DeadInode(f"inode {ino} is in memory, and the kernel would let it grow there")
        self._require_room(ino, record)
        begin = functools.partial(self.begin, ino, record)
        raise NotAtHand("room on the drive", begin, stores=True, ino=ino)

    def _is_kernels(self, opened: OpenInode) -> bool:
        """Whether *opened* is in memory, and the kernel reads it there itself."""
        if not self._pool.open.has_in_memory(opened.ino) or opened.through_daemon:
            return False
        return self._pool.kernel.writers_run_free and not opened.writers

    def may_have(self, opened: OpenInode | None, record: InodeRecord) -> bool:
        """Whether *opened*, with *record*, may have one although nobody is about to write it.

        No file server could follow, and nothing is evicted for it.
        """
        if opened is None or not self._is_kernels(opened) or record.state not in SETTLED:
            return False
        pool = self._pool
        servers = pool.rules.leases.processes.servers.servers
        busy = opened.stands_in or opened.settling or opened.allocating
        if servers or busy or not pool.background.is_serving:
            return False
        return record.allocated_bytes <= pool.space.of(opened.ino).unclaimed_bytes

    def _require_room(self, ino: InodeNo, record: InodeRecord) -> None:
        """Make room for a successor of *ino*, and for its number. Raises NoSpace, NotAtHand."""
        drive = self._pool.space.drives.of(ino)
        self._pool.numbers.require(at_once=False, drive=drive.number)
        self._allocator.require_space(record.allocated_bytes, drive)

    def begin(
        self, ino: InodeNo, record: InodeRecord, *, unlocked: bool = False
    ) -> Callable[[], Callable[[], None]]:
        """Begin one of *ino*, which has *record*; return the work, in a thread, and what follows.

        *unlocked*: none is made while somebody locks the file. Raises OSError; what
        follows raises what the copy did: NoSpace, Damaged, OSError.
        """
        pool = self._pool
        fresh = pool.numbers.give_out(pool.space.drives.of(ino).number)
        pool.space.of(fresh).pledged_bytes += record.allocated_bytes
        return functools.partial(self._copy, ino, record, fresh, unlocked=unlocked)

    def _copy(
        self, ino: InodeNo, record: InodeRecord, fresh: InodeNo, *, unlocked: bool
    ) -> Callable[[], None]:
        pool, held_bytes, failed = self._pool, -1, None
        try:
            fd = pool.extents.open(ino, os.O_RDONLY)
            try:
                if not (unlocked and is_locked(ino)):
                    held_bytes = pool.extents.moves.copy(fresh, fd)
            finally:
                pool.syscalls.close(fd)
        except Exception as error:  # the loop takes the pledge back, and raises it
            failed = error
        return functools.partial(self._copied, ino, record, fresh, held_bytes, failed)

    def _copied(
        self,
        ino: InodeNo,
        record: InodeRecord,
        fresh: InodeNo,
        held_bytes: int,
        failed: Exception | None,
    ) -> None:
        """Let the name lead to *fresh*, if *ino* is still what was copied.

        Atomic: from the last look at it until its name leads elsewhere. Raises NoSpace, OSError.
        """
        pool = self._pool
        pool.space.of(fresh).pledged_bytes -= record.allocated_bytes
        opened = pool.open.inodes.get(ino)
        is_same = opened is not None and self._is_kernels(opened) and not opened.settling
        try:
            if failed is not None:
                raise failed
            if held_bytes < 0 or not is_same or pool.index.inode_or_miss(ino) != record:
                self._undo(fresh)
                return
            self._lead_name_to(fresh, ino, record, held_bytes)
        except BaseException:  # whatever it was: no name leads to the copy
            self._undo(fresh)
            raise
        self.moved += 1
        self.moved_bytes += held_bytes

    def _lead_name_to(
        self, fresh: InodeNo, ino: InodeNo, record: InodeRecord, held_bytes: int
    ) -> None:
        pool, now_ns = self._pool, self._pool.clock_ns()
        attributes = {
            key: value
            for key in pool.index.xattrs(ino)
            if (value := pool.index.xattr(ino, key)) is not None
        }
        named = alias_record(pool.index, record)
        with TreeChange(pool, now_ns, keeps=True) as change:
            heir = record._replace(allocated_bytes=held_bytes)
            change.replace(ino, record, fresh, heir, attributes, Why.MOVED)
        self._namespace.keep_removed(ino, record, now_ns)
        pool.kernel.unnamed(ino)
        for each in (record, named):
            if each is not None:
                pool.kernel.name_vanished(each.parent, each.name)

    def _undo(self, fresh: InodeNo) -> None:
        """Remove the copy, if there is one."""
        pool = self._pool
        pool.background.submit_long(functools.partial(pool.extents.moves.undo, fresh), fresh)
