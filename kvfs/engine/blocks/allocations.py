"""What a file that is open for writing holds: what a write will allocate, fallocate(2), its length.

The device's thread sets a length, since that may wait for the device. Until then the file is
settling (extent_bytes.py), and whoever set the length waits for it before the answer.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from kvfs.core.errors import TooLarge
from kvfs.core.types import SIZE_MAX_BYTES, InodeNo
from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.blocks.served import Emptying
from kvfs.pool.allocator import Allocator
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.pool import Pool
from kvfs.pool.pool_parts import SpaceParts
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, Syscalls


class AllocationRequest(NamedTuple):
    """What an fallocate(2) asks for."""

    mode: int
    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """The offset of its end."""
        return self.offset_bytes + self.length_bytes


class Allocation(NamedTuple):
    """An fallocate(2) to be done: the space pledged until it ends, and the work."""

    pledged_bytes: int
    #: Takes a descriptor of the extent. Raises OSError.
    work: Callable[[int], None]


class Allocations:
    """Begins and ends the allocations in the blocks of one pool."""

    def __init__(self, pool: Pool, allocator: Allocator, publishing: Publishing) -> None:
        self._pool = pool
        self._allocator = allocator
        self._publishing = publishing
        #: Files being written that were set to a length, and the bytes that each got for that.
        self._lengths: dict[InodeNo, tuple[OpenInode, int]] = {}

    def growth_bytes(self, opened: OpenInode, wanted: AllocationRequest) -> int:
        """Return what an fallocate(2) may allocate. Raises TooLarge, OSError."""
        pool, end_bytes = self._pool, wanted.end_bytes
        if end_bytes > SIZE_MAX_BYTES:
            raise TooLarge(f"{end_bytes} bytes")
        if wanted.mode & FALLOC_FL_PUNCH_HOLE:
            return 0
        if pool.kernel.writers_run_free and not opened.through_daemon:
            opened.look_for_holes(pool.syscalls.fstat(opened.fd).st_size)
        return opened.growth_bytes(pool.syscalls, wanted.offset_bytes, end_bytes)

    def write_growth_bytes(self, opened: OpenInode, end_bytes: int, size_bytes: int) -> int:
        """Return what a write of *size_bytes* that ends at *end_bytes* may allocate.

        Raises TooLarge.
        """
        if end_bytes > SIZE_MAX_BYTES:
            raise TooLarge(f"{end_bytes} bytes")
        start_bytes = end_bytes - size_bytes
        return opened.growth_bytes(self._pool.syscalls, start_bytes, end_bytes)

    def begin(self, opened: OpenInode, wanted: AllocationRequest) -> Allocation:
        """Pledge the space of an fallocate(2) on *opened*; return it as work for a thread.

        Raises NoSpace, TooLarge, OSError; the work raises OSError.
        """
        pool = self._pool
        growth_bytes = self.growth_bytes(opened, wanted)
        opened.begin_allocation()
        try:
            if growth_bytes:
                # Other blocks are evicted for it, but not this one, which is open.
                self._allocator.require_space(growth_bytes, pool.space.drives.of(opened.ino))
            if wanted.mode & FALLOC_FL_PUNCH_HOLE:
                opened.note_punched(wanted.offset_bytes)
            self._publishing.allocate_ahead(opened.ino)
        except BaseException:
            opened.end_allocation()
            raise
        pool.space.of(opened.ino).pledged_bytes += growth_bytes

        def work(fd: int) -> None:
            pool.extents.allocate(fd, *wanted)

        return Allocation(growth_bytes, work)

    def claim_length(self, opened: OpenInode, size_bytes: int) -> AllocationRequest | None:
        """Return what to allocate for *opened*, which is about to be *size_bytes* long, or None.

        A store through a mapping cannot wait or return ENOSPC: its process would be killed. So the
        space is allocated before the file has its length. But a length is no promise to write
        as much: ``length_share`` bounds what all files being written get that way. A file beyond
        it is sparse. Raises OSError.
        """
        pool, written = self._pool, self._pool.open.inodes.written
        before_bytes = pool.syscalls.fstat(opened.fd).st_size
        bound_bytes = pool.settings.length_share * pool.space.taken.usable_bytes
        if not 0 < size_bytes - before_bytes <= bound_bytes:
            return None
        wanted = AllocationRequest(FALLOC_FL_KEEP_SIZE, before_bytes, size_bytes - before_bytes)
        lacking_bytes = self.growth_bytes(opened, wanted)
        self._lengths = {
            ino: row for ino, row in self._lengths.items() if written.get(ino) is row[0]
        }
        claimed_bytes = lacking_bytes + sum(held for _, held in self._lengths.values())
        if not lacking_bytes or claimed_bytes > bound_bytes:
            return None
        _, own_bytes = self._lengths.get(opened.ino, (opened, 0))
        self._lengths[opened.ino] = opened, own_bytes + lacking_bytes
        return wanted

    def end(self, opened: OpenInode, allocation: Allocation) -> None:
        """Count what the extent holds, after the work was done or has failed.

        A writer that asked for its space is expected to take no more without asking, so none is
        kept free for it (overrun_watch.py). Raises OSError.
        """
        pool = self._pool
        pool.space.of(opened.ino).pledged_bytes -= allocation.pledged_bytes
        opened.end_allocation()
        if allocation.pledged_bytes:
            opened.has_asked()
        if pool.open.inodes.get(opened.ino) is opened:
            opened.note_allocated(
                pool.extents.allocated_bytes(opened.fd), pool.space.of(opened.ino)
            )


class Lengths:
    """Sets the lengths of the open files of one pool."""

    def __init__(
        self,
        extents: Extents,
        background: Background,
        space: SpaceParts,
        syscalls: Syscalls,
        allocator: Allocator,
        emptying: Emptying,
    ) -> None:
        self._extents = extents
        self._background = background
        self._space = space
        self._syscalls = syscalls
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

        *keeps*: others have it open, so the bytes that it holds stay counted. *empties*: a file
        server empties it. Raises OSError, while no requests are served.
        """
        if keeps:
            self._allocator.make_room_ahead(size_bytes - opened.allocated_bytes, opened.ino)
            opened.resize()
            opened.note_cut(size_bytes)
        opened.settle(
            self._background.of(opened.ino).device,
            functools.partial(self._syscalls.ftruncate, opened.fd, size_bytes),
            functools.partial(self._end, opened, done, keeps=keeps, empties=empties),
        )

    def _end(
        self, opened: OpenInode, done: Callable[[], None], *, keeps: bool, empties: bool
    ) -> None:
        """Count what the file holds now, after its length was set or could not be."""
        if keeps and opened.fd >= 0:
            opened.note_allocated(
                self._extents.allocated_bytes(opened.fd), self._space.of(opened.ino)
            )
        if empties:
            self._emptying.choose_course(opened)
        done()
