"""Gives out space: for bytes, for a draft's extent, for one more name.

Space that is only held in reserve is given up first. Then the ``Room`` above evicts blocks.
"""

import contextlib
from typing import Final

from kvfs.core.errors import NoSpace
from kvfs.core.headroom import UNWATCHED_BYTES, outgrowing_bytes, reserve_bytes
from kvfs.core.types import InodeNo, round_up
from kvfs.pool.draft_growth import DraftGrowth
from kvfs.pool.open_inodes import OpenInode
from kvfs.pool.pool import Pool
from kvfs.pool.ports import Room
from kvfs.pool.reach import Fit, Reach
from kvfs.pool.ready_extents import ReadyExtent

#: If the device is fuller than the capacity says, at least this much is freed at a time.
_DEVICE_STEP_BYTES: Final = 1 << 20
#: This much is freed at a time for the index, which grows by some bytes for each name.
_INDEX_STEP_BYTES: Final = 4 << 20


class Allocator:
    """Gives out the space of one pool."""

    def __init__(self, pool: Pool, room: Room) -> None:
        self._pool = pool
        self._kernel = pool.kernel
        self._space = pool.space
        self._headroom = pool.headroom
        self._monotonic_s = pool.monotonic_s
        self.room = room
        self.reach = Reach(pool, room)
        self.growth = DraftGrowth(pool)

    def require_space(self, size_bytes: int) -> None:
        """Make space for *size_bytes* more data. All space must be requested here.

        Space that is only held in reserve is given up first. Then blocks are evicted, never more
        than is missing, and none if that cannot be enough. Raises NoSpace if there is no space now;
        ``Reclaim.hopeful`` and ``Reach`` tell whether there may be some in a moment.
        """
        space = self._space
        if size_bytes > space.unclaimed_bytes:
            # If it cannot fit: make space for what is already taken, not for what drafts may take.
            self._pool.unlink_queue.hurry(size_bytes)
            fits = self.reach.fit(size_bytes) is Fit.NOW
            self._make_room(size_bytes if fits else -space.lacking_bytes)
        space.require(size_bytes)
        self._headroom.note(size_bytes, self._monotonic_s())

    def _make_room(self, size_bytes: int) -> None:
        """Free space until *size_bytes* (may be negative) are unclaimed, as far as possible."""
        space = self._space
        if size_bytes <= space.unclaimed_bytes:
            return
        self._pool.unlink_queue.hurry(size_bytes)
        recently_removed = self._pool.recently_removed.give_way
        # What forget_nameless gives up becomes recently removed first, hence the second call.
        for give_way in (
            self._pool.ready.give_way,
            recently_removed,
            self.room.forget_nameless,
            recently_removed,
        ):
            if size_bytes <= space.unclaimed_bytes:
                return
            give_way()
            self._pool.unlink_queue.hurry(size_bytes)
        short_bytes = size_bytes - space.unclaimed_bytes
        if short_bytes > 0 and self.room.evict(short_bytes):
            self._pool.unlink_queue.hurry(size_bytes)

    def make_room_ahead(self, size_bytes: int) -> None:
        """Make space for writes into a file that was truncated to a greater length.

        However long the file is, no more is evicted than is kept free ahead of writers anyway.
        """
        if size_bytes > 0:
            with contextlib.suppress(NoSpace):
                self.require_space(min(size_bytes, self._headroom.most_bytes))

    def take_extent(self, parent: InodeNo, *, roomless: bool = False) -> ReadyExtent:
        """Return an extent for a draft in *parent*, with its likely size preallocated if that fits.

        Raises NoSpace if it cannot be made or, unless *roomless*, no byte is free; OSError.
        """
        now_s = self._monotonic_s()
        wanted_bytes = self._reserve_bytes(parent)
        self.growth.look_at_runners()
        try:
            self.require_space(1)
        except NoSpace:
            if not roomless:
                raise
            wanted_bytes = 0
        if wanted_bytes and not self._pool.ready.has(wanted_bytes):
            # A guess must not take the space that other writers need.
            if wanted_bytes > max(self._space.free_bytes // 2, self._pool.evictable_bytes):
                wanted_bytes = 0
            try:
                self.require_space(wanted_bytes)
            except NoSpace:
                wanted_bytes = 0
        if self._pool.short_bytes(now_s) > 0:
            self.room.top_up()
        try:
            return self._pool.ready.take(wanted_bytes, now_s)
        except NoSpace:
            self.find_device_room(_DEVICE_STEP_BYTES)
            return self._pool.ready.take(0, now_s)

    def find_device_room(self, size_bytes: int) -> None:
        """Make space for *size_bytes* on a full device, even if the pool is below its capacity.

        Raises NoSpace, OSError.
        """
        self._pool.device_room.refused()
        self.require_space(size_bytes)

    def _reserve_bytes(self, parent: InodeNo) -> int:
        """Return how much to preallocate for a draft in *parent*, if there is space."""
        demand = self._pool.ready.forecast
        usual_bytes = demand.usual_bytes(parent)
        if not self._kernel.writers_run_free:
            return round_up(usual_bytes)  # a write beyond that asks for space
        return reserve_bytes(
            usual_bytes,
            demand.largest_bytes(parent),
            spared_bytes=self._pool.open_inodes.spare_bytes,
            capacity_bytes=self._space.capacity_bytes,
        )

    def late_reserve_bytes(self, opened: OpenInode, growth_bytes: int) -> int:
        """Return up to which offset to preallocate a draft that got no reserve; 0 for nothing.

        Eviction for the *growth_bytes* of its next write may have freed enough for all of it.
        """
        if not opened.created_in or not opened.unfinished:
            return 0
        if opened.front_bytes not in (-1, opened.allocated_bytes):
            return 0  # some of its blocks may be beyond the reserve (holes.py)
        usual_bytes = round_up(self._pool.ready.forecast.usual_bytes(opened.created_in))
        lacking_bytes = usual_bytes - opened.allocated_bytes
        return usual_bytes if growth_bytes < lacking_bytes <= self._space.unclaimed_bytes else 0

    def choose_course(self, opened: OpenInode, parent: InodeNo) -> None:
        """Decide, at a file's first handle, whether its writers must ask before each write.

        They need not if the file's likely size is reserved, or while there is more space than all
        writers without a reserve could take until the next check.
        """
        if not self._kernel.writers_run_free:
            return
        demand = self._pool.ready.forecast
        largest_bytes = demand.largest_bytes(parent)
        foretold = largest_bytes and demand.foretells(parent)
        opened.unreserved = not foretold or opened.allocated_bytes < largest_bytes
        if not opened.unreserved:
            usual_bytes = demand.usual_bytes(parent)
            self._pool.open_inodes.spare(opened, max(0, opened.allocated_bytes - usual_bytes))
            opened.outgrowing_bytes = outgrowing_bytes(usual_bytes, largest_bytes)
            self._space.lacking_bytes = max(self._space.lacking_bytes, opened.outgrowing_bytes)
            return
        running = 1 + len(self._pool.open_inodes.runners)
        if self._space.unclaimed_bytes < UNWATCHED_BYTES * running:
            opened.through_daemon = True
        else:
            self._pool.open_inodes.let_run(opened)

    # ---- names ----

    def require_name(self) -> None:
        """Evict blocks if the index would refuse one more name."""
        room = self._pool.index.room
        if room.crowded:
            self.room.evict_names()
            if room.crowded:
                self._grow_index()

    def _grow_index(self) -> None:
        """Preallocate more for the index; evict blocks if the device is full."""
        index = self._pool.index
        with contextlib.suppress(NoSpace):
            try:
                index.preallocate()
            except NoSpace:
                self.make_index_room()
                index.preallocate()
        index.room.look()

    def make_index_room(self) -> None:
        """Evict blocks to make space for the index's file, as far as possible. Raises OSError."""
        with contextlib.suppress(NoSpace):
            self.find_device_room(_INDEX_STEP_BYTES)
