"""The length of a file that is open for writing, as a client sets it.

The device's thread sets it, since that may wait for the device. Until then the file is settling
(extent_bytes.py), and whoever set the length waits for it before the answer.
"""

import functools
from collections.abc import Callable

from kvfs.engine.blocks.served import Emptying
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool


class Lengths:
    """Sets the lengths of the open files of one pool."""

    def __init__(self, pool: Pool, allocator: Allocator, emptying: Emptying) -> None:
        self._pool = pool
        self._allocator = allocator
        self._emptying = emptying

    def set(
        self,
        opened: OpenInode,
        size_bytes: int,
        done: Callable[[], None],
        *,
        keeps: bool,
        empties: bool,
    ) -> None:
        """Set the length of *opened*; growing allocates nothing. *done* is called then.

        *keeps*: it stays open for others, so that what it holds is counted. *empties*: a file
        server empties it. Raises OSError, while no requests are served.
        """
        pool = self._pool
        if keeps:
            self._allocator.make_room_ahead(size_bytes - opened.allocated_bytes)
            opened.resize()
            opened.note_cut(size_bytes)
        opened.settle(
            pool.background.device,
            functools.partial(pool.syscalls.ftruncate, opened.fd, size_bytes),
            functools.partial(self._end, opened, done, keeps=keeps, empties=empties),
        )

    def _end(
        self, opened: OpenInode, done: Callable[[], None], *, keeps: bool, empties: bool
    ) -> None:
        """Count what the file holds now, after its length was set or could not be."""
        if keeps and opened.fd >= 0:
            opened.note_allocated(
                self._pool.extents.allocated_bytes(opened.fd), self._pool.space.taken
            )
        if empties:
            self._emptying.choose_course(opened)
        done()
