"""Gives out space: for bytes, for a draft's extent, for one more name.

First it is asked whether a request can be met at all (``Reach``): from what is free, and what may
be evicted. Otherwise a request that fails in the end could empty the cache first: an ``fallocate``
of a petabyte, by any user who may create a file. Then space that is only held in reserve is given
up, and then the ``Room`` above evicts blocks. Passthrough writers allocate in the backing file
system, without asking; what they took is counted here afterwards (``DraftGrowth``).
"""

import contextlib
import enum
import functools
import logging
from collections.abc import Callable
from itertools import islice
from typing import Final

from kvfs.core.errors import NoSpace, NotAtHand
from kvfs.core.headroom import UNWATCHED_BYTES, lacking_bytes, outgrowing_bytes, reserve_bytes
from kvfs.core.index_room import unevictable_bytes
from kvfs.core.types import FIRST_DRIVE, InodeNo, round_up
from kvfs.machine.processes import Maker
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.open.ports import Room
from kvfs.pool.open.ready_extents import ReadyExtent
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive

_log: Final = logging.getLogger(__name__)
#: If the device is fuller than the capacity says, at least this much is freed at a time.
_DEVICE_STEP_BYTES: Final = 1 << 20
#: This much is freed at a time for the index, which grows by some bytes for each name.
_INDEX_STEP_BYTES: Final = 4 << 20
#: Files checked before a new draft is created. There are more such files only while there is space
#: for all of them until the next tick.
_LOOKS_A_DRAFT: Final = 32


class Fit(enum.Enum):
    """Whether a request can be met."""

    NOW = enum.auto()
    """Yes, by evicting what may be evicted now."""
    AFTER_USERS = enum.auto()
    """Only with the space of blocks that are open now."""
    AFTER_GUESSES = enum.auto()
    """Only if drafts do not take the space that is kept free for them."""
    LATER = enum.auto()
    """Only once drafts, or blocks without a name, are closed."""
    NEVER = enum.auto()
    """Not while leases, pins and slabs keep their space; or it is more than the pool can hold."""


class Reach:
    """What requests for space can get from one drive.

    An upper bound: that a closed block is still mapped shows only when it is to be evicted.
    """

    def __init__(
        self,
        evictable_on: Callable[[PoolDrive], int],
        in_use_on: Callable[[PoolDrive], int],
        room: Room,
    ) -> None:
        """See ``Pool`` for the first two."""
        self._evictable_on = evictable_on
        self._in_use_on = in_use_on
        self._room = room

    def fit(self, size_bytes: int, drive: PoolDrive) -> Fit:
        """Return whether *drive* has *size_bytes* for a request, as far as is known now."""
        space, evictable_bytes = drive.space, self._evictable_on(drive)
        at_most_bytes = self._at_most_bytes(drive, evictable_bytes)
        if size_bytes <= at_most_bytes:
            # For larger requests open blocks are subtracted. A smaller request evicts no more than
            # is kept free ahead of writers anyway, so a wrong guess costs little.
            if size_bytes <= drive.headroom.most_bytes:
                return Fit.NOW
            used_bytes = self._in_use_on(drive)
            return Fit.NOW if size_bytes <= at_most_bytes - used_bytes else Fit.AFTER_USERS
        if size_bytes <= at_most_bytes + space.lacking_bytes:
            return Fit.AFTER_GUESSES
        stays_bytes = max(0, space.recorded_bytes - evictable_bytes)
        if not self._room.all_known:
            stays_bytes = 0  # some of it may be evictable
        return Fit.LATER if size_bytes <= space.bound_bytes - stays_bytes else Fit.NEVER

    def _at_most_bytes(self, drive: PoolDrive, evictable_bytes: int) -> int:
        """Return the bytes that are free, only held in reserve, or evictable."""
        space = drive.space
        convenience_bytes = (
            space.ready_bytes
            + space.pending_delete_bytes
            + space.stray_bytes
            + space.removed_bytes
            + self._room.nameless_bytes(drive)
        )
        return space.unclaimed_bytes + convenience_bytes + evictable_bytes


class DraftGrowth:
    """How much passthrough writers have allocated since the last check, by file."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def look_at_runners(self) -> None:
        """Count what writers without a limit took, before another one is permitted.

        If there are many, check only those that were not checked for longest.
        """
        runners = self._pool.open.inodes.runners
        now_s = self._pool.monotonic_s()
        for ino in list(islice(runners, _LOOKS_A_DRAFT)):
            opened = runners.pop(ino)
            if opened.runs_free:
                self.measure(opened, now_s)
                runners[ino] = opened  # moved to the end

    def measure(self, opened: OpenInode, now_s: float) -> int:
        """Count the bytes that *opened* took since the last check; return what it may take next."""
        pool = self._pool
        if (
            opened.fd < 0
            or opened.through_daemon
            or not pool.kernel.writers_run_free
            or opened.allocating
        ):
            return 0  # each of its writes asks for space and is counted
        if opened.overrun:
            self.empty(opened)
            if pool.background.is_serving:
                return 0  # ``empty`` measures it at its end
        try:
            allocated_bytes = pool.extents.allocated_bytes(opened.fd)
        except OSError as error:
            _log.warning("inode %#x: %s", opened.ino, error)
            return 0
        growth_bytes = allocated_bytes - opened.allocated_bytes
        drive = pool.space.drives.of(opened.ino)
        opened.note_allocated(allocated_bytes, drive.space)
        if opened.overrun:
            return 0
        if growth_bytes > 0:
            drive.headroom.count(growth_bytes, now_s)
        opened.take_unasked(growth_bytes)
        return lacking_bytes(opened.outgrown, unreserved=opened.unreserved)

    def empty(self, opened: OpenInode) -> None:
        """Free all bytes of *opened*, because it outgrew the pool.

        They count as free at once, so that no more drafts are stopped than need be.
        """
        held_bytes = opened.allocated_bytes
        opened.note_allocated(0, self._pool.space.of(opened.ino))
        self._pool.background.of(opened.ino).device.submit(
            functools.partial(self._try_empty, opened, opened.fd, held_bytes),
            functools.partial(self._emptied, opened),
            at_once=True,
        )

    def _try_empty(self, opened: OpenInode, fd: int, held_bytes: int) -> int:
        """Return what is left behind *fd*; in the device's thread."""
        try:
            return self._pool.extents.empty(fd)
        except OSError as error:
            _log.warning("inode %#x keeps its bytes: %s", opened.ino, error)
            return held_bytes

    def _emptied(self, opened: OpenInode, left_bytes: int) -> None:
        if self._pool.open.inodes.get(opened.ino) is opened:
            opened.note_allocated(left_bytes, self._pool.space.of(opened.ino))


class Allocator:
    """Gives out the space of one pool."""

    def __init__(self, pool: Pool, room: Room) -> None:
        self._pool = pool
        self._kernel, self._monotonic_s = pool.kernel, pool.monotonic_s
        self._placement, self._probation = pool.open.placement, pool.open.probation
        drives = pool.space.drives.all
        self._only: Final = None if drives[1:] else drives[FIRST_DRIVE]
        self._ready: Final = pool.open.ready.queues.all
        self.room = room
        self.reach = Reach(pool.evictable_on, pool.in_use_bytes, room)
        self.growth = DraftGrowth(pool)

    def require_space(self, size_bytes: int, drive: PoolDrive) -> None:
        """Make space for *size_bytes* more data on *drive*. All space must be requested here.

        Space that is only held in reserve is given up first. Then blocks are evicted, never more
        than is missing, and none if that cannot be enough. Raises NoSpace if there is no space now;
        ``Reclaim.hopeful`` and ``Reach`` tell whether there may be some in a moment. Raises
        NotAtHand if the device is freeing some.
        """
        space = drive.space
        if size_bytes > space.unclaimed_bytes:
            # If it cannot fit: make space for what is already taken, not for what drafts may take.
            drive.unlink_queue.hurry(size_bytes)
            fits = self.reach.fit(size_bytes, drive) is Fit.NOW
            self._make_room(size_bytes if fits else -space.lacking_bytes, drive)
            if space.coming_bytes and size_bytes > space.unclaimed_bytes:
                raise NotAtHand.under_way("space", stores=True, ino=drive.ino)
            space.require(size_bytes)
        drive.headroom.count(size_bytes, self._monotonic_s())

    def require_beginning(self) -> None:
        """Make space for the first byte of a draft, on any drive. Raises NoSpace, NotAtHand."""
        refused: NoSpace | None = None
        for drive in self._placement.candidates(1):
            try:
                self.require_space(1, drive)
            except NoSpace as error:
                refused = error
            else:
                return
        raise refused or NoSpace("no drive")

    def _make_room(self, size_bytes: int, drive: PoolDrive) -> None:
        """Free space until *size_bytes* (may be negative) are unclaimed, as far as possible.

        What the device's thread is freeing counts as free.
        """
        space = drive.space
        if size_bytes <= space.unclaimed_bytes + space.coming_bytes:
            return
        drive.unlink_queue.hurry(size_bytes)
        recently_removed = functools.partial(self._pool.departures.removed.give_way, space)
        # What forget_nameless gives up becomes recently removed first, hence the second call.
        for give_way in (
            self._ready[drive.number].give_way,
            recently_removed,
            self.room.forget_nameless,
            recently_removed,
        ):
            if size_bytes <= space.unclaimed_bytes + space.coming_bytes:
                return
            give_way()
            drive.unlink_queue.hurry(size_bytes)
        short_bytes = size_bytes - space.unclaimed_bytes - space.coming_bytes
        if short_bytes > 0 and self.room.evict(short_bytes, drive):
            drive.unlink_queue.hurry(size_bytes)

    def make_room_ahead(self, size_bytes: int, ino: InodeNo) -> None:
        """Make space for writes into file *ino*, which was truncated to a greater length.

        However long the file is, no more is evicted than is kept free ahead of writers anyway.
        """
        if size_bytes > 0:
            drive = self._pool.space.drives.of(ino)
            with contextlib.suppress(NoSpace, NotAtHand):
                self.require_space(min(size_bytes, drive.headroom.most_bytes), drive)

    def take_extent(self, parent: InodeNo, maker: Maker, *, roomless: bool = False) -> ReadyExtent:
        """Return an extent for a draft of *maker* in *parent*.

        Its likely size is preallocated if that fits.

        Raises NoSpace if it cannot be made or, unless *roomless*, no byte is free; NotAtHand,
        OSError.
        """
        wanted_bytes = self._reserve_bytes(parent)
        self.growth.look_at_runners()
        if self._only is not None:
            return self._take_on(self._only, wanted_bytes, roomless=roomless)
        drives = self._placement.candidates(wanted_bytes, chain := (parent, maker))
        for drive in drives:  # another one, before anybody is refused
            turn = self._placement.turn(drive, wanted_bytes, chain)
            try:
                extent = self._take_on(drive, wanted_bytes, roomless=False)
            except NoSpace:
                continue
            except NotAtHand as lack:
                raise lack.beginning(turn) from lack
            turn()
            return extent
        return self._take_on(drives[0], wanted_bytes, roomless=roomless)

    def _take_on(self, drive: PoolDrive, wanted_bytes: int, *, roomless: bool) -> ReadyExtent:
        """Return an extent of *drive*, as ``take_extent``."""
        now_s, space, ready = self._monotonic_s(), drive.space, self._ready[drive.number]
        if self._probation is not None:
            extent = self._probation.give_out(wanted_bytes, drive, self.require_space)
            if extent is not None:
                return extent
        try:
            # What was brought has its space already, and must not give way for a byte more.
            if not (wanted_bytes and ready.has_brought(wanted_bytes)):
                self.require_space(1, drive)
        except NoSpace:
            if not roomless:
                raise
            wanted_bytes = 0
        if wanted_bytes and not ready.has(wanted_bytes):
            # A guess must not take the space that other writers need.
            if wanted_bytes > max(space.free_bytes // 2, self._pool.evictable_on(drive)):
                wanted_bytes = 0
            try:
                self.require_space(wanted_bytes, drive)
            except NoSpace:
                wanted_bytes = 0
        free_bytes = space.unclaimed_bytes + space.pending_delete_bytes
        headroom = drive.headroom
        if free_bytes < headroom.most_bytes and headroom.short_bytes(free_bytes, now_s) > 0:
            self.room.top_up()
        # If the device is fuller than the capacity says, an empty one may still fit.
        for size_bytes in dict.fromkeys((wanted_bytes, 0)):
            with contextlib.suppress(NoSpace):
                return ready.give_out(size_bytes, now_s)
        with contextlib.suppress(NotAtHand):  # it is being freed, and then comes the extent
            self.find_device_room(_DEVICE_STEP_BYTES, drive)
        return ready.give_out(0, now_s, insists=True)

    def find_device_room(self, size_bytes: int, drive: PoolDrive) -> None:
        """Make space for *size_bytes* on *drive*, which is full, even if below its capacity.

        Raises NoSpace, NotAtHand, OSError.
        """
        drive.device_room.refused()
        self.require_space(size_bytes, drive)

    def _reserve_bytes(self, parent: InodeNo) -> int:
        """Return how much to preallocate for a draft in *parent*, if there is space."""
        demand = self._pool.open.ready.forecast
        if not self._kernel.writers_run_free:
            # A write beyond that asks for space.
            return round_up(demand.usual_bytes(parent))
        return reserve_bytes(
            *demand.recent_bytes(parent),
            spared_bytes=self._pool.open.inodes.spare_bytes,
            capacity_bytes=self._pool.space.taken.capacity_bytes,
        )

    def late_reserve_bytes(self, opened: OpenInode, growth_bytes: int) -> int:
        """Return up to which offset to preallocate a draft that got no reserve; 0 for nothing.

        Eviction for the *growth_bytes* of its next write may have freed enough for all of it.
        """
        if not opened.created_in or not opened.unfinished:
            return 0
        if opened.front_bytes not in (-1, opened.allocated_bytes):
            return 0  # some of its blocks may be beyond the reserve (extent_bytes.py)
        usual_bytes = round_up(self._pool.open.ready.forecast.usual_bytes(opened.created_in))
        lacking_bytes = usual_bytes - opened.allocated_bytes
        unclaimed_bytes = self._pool.space.of(opened.ino).unclaimed_bytes
        return usual_bytes if growth_bytes < lacking_bytes <= unclaimed_bytes else 0

    def choose_course(self, opened: OpenInode, parent: InodeNo) -> None:
        """Decide, at a file's first handle, whether its writers must ask before each write.

        They need not if the file's likely size is reserved, or while there is more space than all
        writers without a reserve could take until the next check. In memory they must.
        """
        if not self._kernel.writers_run_free:
            return
        demand, space = self._pool.open.ready.forecast, self._pool.space.of(opened.ino)
        usual_bytes, largest_bytes = demand.recent_bytes(parent)
        is_in_memory = self._pool.open.has_in_memory(opened.ino)
        foretold = largest_bytes and demand.foretells(parent) and not is_in_memory
        if foretold and opened.allocated_bytes >= largest_bytes:
            self._pool.open.inodes.spare(opened, max(0, opened.allocated_bytes - usual_bytes))
            opened.rely(outgrowing_bytes(usual_bytes, largest_bytes))
            space.lacking_bytes = max(space.lacking_bytes, opened.outgrowing_bytes)
            return
        running = 1 + len(self._pool.open.inodes.runners)
        if is_in_memory or space.unclaimed_bytes < UNWATCHED_BYTES * running:
            opened.lack()
        else:
            self._pool.open.inodes.let_run(opened)

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
        index.room.measure()

    def make_index_room(self) -> None:
        """Evict blocks to make space for the index's file, as far as possible. Raises OSError."""
        with contextlib.suppress(NoSpace, NotAtHand):
            self.find_device_room(_INDEX_STEP_BYTES, self._pool.space.drives.all[FIRST_DRIVE])


# ---- limits on new names ----


def require_node(pool: Pool, uid: int) -> None:
    """Raise NoSpace if user *uid*, unless root, has too much of what is never evicted."""
    if not uid:
        return
    index_room = pool.index.room
    taken_bytes = unevictable_bytes(pool.counters, index_room.rows_bytes())
    # Such inodes must not take the index's map from the names of blocks, nor the device from their
    # bytes, also where others use a part of the device.
    whole_bytes = min(pool.space.taken.usable_bytes, index_room.map_bytes)
    if pool.space.node_shares.refuses(uid, taken_bytes, whole_bytes):
        raise NoSpace("directories, symlinks and attributes have their share of the pool")
