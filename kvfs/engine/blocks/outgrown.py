"""Drafts that outgrow memory: each moves to its drive while it is written.

All its writes come to the server (``Allocator.choose_course``). One that finds no room waits until
the bytes so far are copied, and those that come meanwhile wait with it. Then the descriptor is that
of the copy: the inode, its number and all handles stay. A server that is killed before that leaves
the file in memory, which is the truth (storage/memory_files.py), and one that is killed after it
the other one.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Final

from kvfs.core.errors import KvfsError, NoSpace, NotAtHand
from kvfs.core.types import InodeNo, round_up
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool

#: How long a write waits before it asks again whether those before it have ended.
_PAUSE_S: Final = 0.002


class Outgrown:
    """The drafts of one pool that leave memory before they are closed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: Those that are being copied.
        self._moving: set[InodeNo] = set()
        self.moved = self.moved_bytes = 0

    def __contains__(self, ino: object) -> bool:
        return ino in self._moving

    def require(self, opened: OpenInode, offset_bytes: int, size_bytes: int) -> None:
        """Raise NotAtHand if *opened* has to leave memory before so many bytes are written there.

        Else they have room. To be asked before the write counts as under way. Raises NoSpace if it
        cannot leave, because the kernel reads it there.
        """
        pool, ino = self._pool, opened.ino
        probation = pool.open.probation
        if probation is None or ino not in probation:
            return
        held_bytes = opened.allocated_bytes
        end_bytes = round_up(offset_bytes + size_bytes)
        end_bytes = max(held_bytes, min(end_bytes, held_bytes + round_up(size_bytes) + round_up(1)))
        has_room = ino not in self._moving and probation.lets_grow(ino, end_bytes)
        if not has_room and pool.kernel.writers_run_free and not opened.through_daemon:
            # A file server writes late, and the kernel has the extent for others, who keep it.
            raise NoSpace(f"inode {ino} is read in memory, which has no room for more of it")
        if not has_room:
            begin = functools.partial(self._begin, opened)
            raise NotAtHand("room in memory", begin, stores=True, ino=ino)

    def _begin(self, opened: OpenInode) -> Callable[[], Callable[[], None]]:
        busy = opened.transfers or opened.allocating or opened.settling
        if busy or opened.ino in self._moving:
            return _wait
        self._moving.add(opened.ino)
        return functools.partial(self._copy, opened, opened.fd, opened.settled_times)

    def _copy(self, opened: OpenInode, fd: int, settled_times: int) -> Callable[[], None]:
        """Copy what is behind *fd*, in a thread; return what follows."""
        moves, ino = self._pool.extents.moves, opened.ino
        try:
            held_bytes = moves.copy(ino, fd)
            copy_fd = moves.open(ino)
        except (KvfsError, OSError) as error:
            return functools.partial(self._failed, ino, error)
        return functools.partial(self._copied, opened, settled_times, held_bytes, copy_fd)

    def _failed(self, ino: InodeNo, error: Exception) -> None:
        self._moving.discard(ino)
        self._undo(ino)
        raise error

    def _copied(self, opened: OpenInode, settled_times: int, held_bytes: int, copy_fd: int) -> None:
        """Let *opened* leave memory, if it is still what was copied.

        Atomic: from the last look at it until its descriptor is that of the copy. Raises OSError.
        """
        pool, ino = self._pool, opened.ino
        self._moving.discard(ino)
        memory = pool.extents.memory
        assert memory is not None, "it is there"
        is_open = pool.open.inodes.written.get(ino) is opened
        if not is_open or ino not in memory or opened.settled_times != settled_times:
            os.close(copy_fd)
            self._undo(ino)
            return
        try:
            left = memory.leave(ino)
        except BaseException:
            os.close(copy_fd)
            self._undo(ino)
            raise
        opened.exchange_extent(copy_fd)
        pool.at_hand.forget(ino)
        pool.background.submit_long(functools.partial(memory.remove, left), ino)
        opened.note_allocated(held_bytes, pool.space.of(ino))
        self.moved += 1
        self.moved_bytes += held_bytes

    def _undo(self, ino: InodeNo) -> None:
        """Remove the copy of *ino*, which is in memory still, or gone."""
        pool = self._pool
        pool.background.submit_long(functools.partial(pool.extents.moves.undo, ino), ino)


def _wait() -> Callable[[], None]:
    time.sleep(_PAUSE_S)
    return lambda: None
