"""Waiting for space: what a request does when the pool is full and something may still be evicted.

Every wait has a bound, and none begins if nothing can be evicted. The oldest waiter looks for space
for all of them. Hundreds that search each for themselves would leave the event loop no time for the
closes that free some.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final

import trio

from kvfs.core.account import ROOT
from kvfs.core.errors import NO_SPACE, NoSpace, NotAtHand
from kvfs.core.sizes import format_size
from kvfs.core.types import InodeNo
from kvfs.engine.blocks.allocations import AllocationRequest
from kvfs.engine.store import Store
from kvfs.pool.allocator import Fit
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.pool.space.drive import PoolDrive
from mount.files.device_asks import DeviceAsks
from mount.files.held_shares import WaitShares
from mount.fuse.late import AboutToWait

#: Between two looks. A scan of a million rows takes 20 ms, as does an unlink of a large extent.
_LOOK_S: Final = 0.002
#: The pause after a look is at least this many times as long: others need the event loop, too.
_REST: Final = 3
#: A block closed just now may still count as open, so used blocks are evicted only after this.
_PATIENCE_S: Final = 0.05
#: The longest wait for readers that read on although the name of their block is gone.
_LAST_USER_S: Final = 1.0
#: How often to try on a device that others fill as fast as space is made.
DEVICE_TRIES: Final = 3
#: If others have taken so often what the device had freed for a request, it waits in the line.
_CALLS_MAX: Final = 8
#: A CREATE waits with its directory locked, and lookups there wait with it. So it waits no longer
#: than a usual load takes, and all creates together only for a share of the time.
_CREATES_S: Final = 0.2
_CREATES_SHARE: Final = 0.25
#: The memory of a waiter: a task, its frames and its place in the line.
_WAITER_BYTES: Final = 8192


class _Waiter:
    """A request that waits for space."""

    __slots__ = (
        *("drives", "granted", "in_vain", "pending", "since_s", "size_bytes", "turn", "until_s"),
    )

    def __init__(
        self,
        size_bytes: int,
        drives: Sequence[PoolDrive],
        since_s: float,
        until_s: float,
        *,
        in_vain: bool,
    ) -> None:
        self.size_bytes = size_bytes
        #: Where they may be.
        self.drives = drives
        self.since_s = since_s
        self.until_s = until_s
        #: Whether another waiter has just waited in vain.
        self.in_vain = in_vain
        self.pending = True
        #: The drive on which its space is pledged; it takes that over when it runs next.
        self.granted: PoolDrive | None = None
        #: Set when it is decided, or when it becomes the oldest.
        self.turn = trio.Event()


class _Allowance:
    """How long all creates together may wait: a bucket that fills while none of them waits."""

    def __init__(self) -> None:
        self._left_s = _CREATES_S
        self._settled_s = -math.inf
        self._waiting = 0

    def begin(self, now_s: float) -> float:
        """Count one more waiter; return how long it may wait."""
        self._settle(now_s)
        self._waiting += 1
        return self._left_s

    def end(self, now_s: float) -> None:
        """Count one waiter less."""
        self._settle(now_s)
        self._waiting -= 1

    def _settle(self, now_s: float) -> None:
        passed_s, self._settled_s = now_s - self._settled_s, now_s
        if self._waiting:
            self._left_s -= passed_s
        else:
            self._left_s = min(_CREATES_S, self._left_s + passed_s * _CREATES_SHARE)


class _Prospect:
    """What may still free space on a drive. Each is checked once: some look at all open files."""

    def __init__(self, store: Store, drive: PoolDrive) -> None:
        self._reclaim, self._pool = store.reclaim, store.pool
        self._reach: Final = store.allocator.reach
        self._drive: Final = drive
        self._hopeful: Final = store.reclaim.hopeful(drive)

    @functools.cached_property
    def awaits_users(self) -> bool:
        """Whether space would be freed if the users of some blocks closed them."""
        return self._reclaim.awaits_users(self._drive)

    @functools.cached_property
    def users_came_lately(self) -> bool:
        """Whether one of these users may be done soon."""
        return self._reclaim.users_came_lately(self._pool.settings.room_wait_s, self._drive)

    def worth_waiting(self, size_bytes: int, waited_s: float) -> bool:
        """Whether a request that has waited *waited_s* may still get *size_bytes*."""
        longest_s, fit = self._pool.settings.room_wait_s, self._reach.fit(size_bytes, self._drive)
        if fit is Fit.NEVER:
            return False
        may_go = self._hopeful or (not waited_s and self._pool.evictable_on(self._drive))
        if may_go or fit in (Fit.AFTER_GUESSES, Fit.AFTER_USERS):
            return waited_s < longest_s
        if waited_s < _LAST_USER_S:
            return self.awaits_users
        return waited_s < longest_s and self.users_came_lately

    def may_evict(self, size_bytes: int) -> bool:
        """Whether evicting again may give *size_bytes*."""
        return self._hopeful and self._reach.fit(size_bytes, self._drive) is Fit.NOW


class _Prospects:
    """The prospects of all drives, as long as nothing changes them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[PoolDrive, _Prospect] = {}

    def of(self, drives: Sequence[PoolDrive]) -> Iterator[_Prospect]:
        """Yield the prospect of each of *drives*."""
        for drive in drives:
            found = self._known.get(drive)
            if found is None:
                found = self._known[drive] = _Prospect(self._store, drive)
            yield found

    def forget(self) -> None:
        """Look again, since something was freed or evicted."""
        self._known.clear()


class SpaceQueue:
    """The queue of requests that wait for space, and its counters."""

    def __init__(self, store: Store, asks: DeviceAsks) -> None:
        self._store = store
        self._asks = asks
        self.stalls = 0
        self.stalled_s = 0.0
        self.longest_s = 0.0
        accounts = store.pool.space.accounts
        self.shares: Final = WaitShares(
            accounts.waiting, lambda: store.pool.settings.room_wait_bytes
        )
        #: Oldest first, without those that are decided.
        self._line: dict[_Waiter, None] = {}
        self._allowance = _Allowance()
        self._pause_s = _LOOK_S
        #: Until this time no request starts to wait for users that another one waited for in vain.
        self._vain_until_s = 0.0

    async def find(
        self,
        size_bytes: int,
        ino: InodeNo,
        about_to_wait: AboutToWait | None = None,
        held_bytes: int = 0,
        payer: int = ROOT,
    ) -> None:
        """Return once there are *size_bytes* of room for *ino*, after waiting for them if need be.

        The caller holds *held_bytes* of memory meanwhile, for *payer*. Raises NoSpace when nothing
        is left to evict, after ``room_wait_s``, or when waiters hold ``room_wait_bytes`` already;
        OverShare if those of the payer's tenant have their share of that.
        """
        drive = self._store.pool.space.drives.of(ino)
        try:
            space = functools.partial(self._store.allocator.require_space, size_bytes, drive)
            await self._require(size_bytes, space, about_to_wait)
        except NoSpace:
            if not self._worth_waiting(size_bytes, (drive,), 0.0):
                raise
            now_s = trio.current_time()
            # One after the other, such waiters would delay all that need space by a second each.
            in_vain = now_s < self._vain_until_s
            waiter = _Waiter(size_bytes, (drive,), now_s, math.inf, in_vain=in_vain)
            await self._make(waiter, about_to_wait, held_bytes, payer)

    async def allocate(
        self,
        opened: OpenInode,
        wanted: AllocationRequest,
        about_to_wait: AboutToWait | None = None,
        payer: int = ROOT,
    ) -> None:
        """Do an fallocate(2) in a thread (tmpfs clears memory), with room for it.

        Raises NoSpace, TooLarge, DeviceSilent, OSError.
        """
        allocations = self._store.blocks.allocations
        for tries_left in reversed(range(DEVICE_TRIES)):
            await self.leave_memory(opened, *wanted[1:], about_to_wait)
            lacking_bytes = allocations.growth_bytes(opened, wanted)
            if lacking_bytes:
                await self.find(lacking_bytes, opened.ino, about_to_wait, payer=payer)
            # Atomic: no checkpoint since the space was found.
            allocation = allocations.begin(opened, wanted)
            try:
                await self._asks.transfer(
                    *(allocation.work, opened.fd, about_to_wait), ino=opened.ino, stores=True
                )
            except OSError as error:
                if error.errno not in NO_SPACE or not tries_left:
                    raise
            else:
                return
            finally:
                allocations.end(opened, allocation)
            # Others fill the file system that the pool lies on.
            await self.device_refused(opened.ino, about_to_wait)

    async def leave_memory(
        self,
        opened: OpenInode,
        offset_bytes: int,
        size_bytes: int,
        about_to_wait: AboutToWait | None,
    ) -> None:
        """Return once so much may be written into *opened*, on its drive if memory lacks room.

        No checkpoint comes between that and returning. Raises NoSpace, DeviceSilent, OSError.
        """
        require = self._store.probation_ends.outgrown.require
        if self._store.pool.open.probation is not None:
            lacks = functools.partial(require, opened, offset_bytes, size_bytes)
            await self._asks.at_hand(lacks, about_to_wait)

    async def device_refused(self, ino: InodeNo, about_to_wait: AboutToWait | None) -> None:
        """Find out what *ino*'s drive really has: it refused bytes that kvfs had room for.

        Raises DeviceSilent, OSError.
        """
        await self._asks.in_order(about_to_wait, ino=ino)  # what is being freed is free first
        self._store.pool.space.drives.of(ino).device_room.refused()

    async def find_to_begin(self, about_to_wait: AboutToWait, payer: int = ROOT) -> None:
        """Return when a draft may be created: there is space, or some may come.

        Its first write asks again. Raises NoSpace when nothing more can be evicted.
        """
        try:
            await self._require(1, self._store.allocator.require_beginning, about_to_wait)
        except NoSpace:
            if not self.lets_begin():
                raise
            now_s = trio.current_time()
            allowed_s = self._allowance.begin(now_s)
            try:
                if allowed_s > _PATIENCE_S:
                    drives = self._store.pool.space.serving
                    waiter = _Waiter(1, drives, now_s, now_s + allowed_s, in_vain=False)
                    await self._make(waiter, about_to_wait, 0, payer)
            except NoSpace:
                if not self.lets_begin(trio.current_time() - now_s):
                    raise
            finally:
                self._allowance.end(trio.current_time())

    async def _require(
        self, size_bytes: int, space: Callable[[], None], about_to_wait: AboutToWait | None
    ) -> None:
        """Make *space* for *size_bytes*, after a device has freed some if need be. Raises NoSpace.

        No checkpoint comes between finding it and returning.
        """
        try:
            await self._asks.at_hand(space, about_to_wait, calls_max=_CALLS_MAX)
        except NotAtHand as lack:  # the device frees less than others take
            raise NoSpace(f"no {format_size(size_bytes)} yet") from lack

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._line)

    def lets_begin(self, waited_s: float = 0.0) -> bool:
        """Whether space for a new draft may become free, after a wait of *waited_s*."""
        return self._worth_waiting(1, self._store.pool.space.serving, waited_s)

    def _worth_waiting(self, size_bytes: int, drives: Sequence[PoolDrive], waited_s: float) -> bool:
        prospects = _Prospects(self._store).of(drives)
        return any(each.worth_waiting(size_bytes, waited_s) for each in prospects)

    async def _make(
        self, waiter: _Waiter, about_to_wait: AboutToWait | None, held_bytes: int, payer: int
    ) -> None:
        """Wait for room; no checkpoint comes between finding it and returning. Raises NoSpace."""
        held_bytes += _WAITER_BYTES
        self.shares.begin(payer, held_bytes)
        self.stalls += 1
        resume = None if about_to_wait is None else about_to_wait()
        try:
            await self._wait_in_line(waiter)
        finally:
            if resume is not None:
                resume()
            self.shares.end(payer, held_bytes)
            waited_s = trio.current_time() - waiter.since_s
            self.stalled_s += waited_s
            self.longest_s = max(self.longest_s, waited_s)
        if waiter.granted is None:
            if not waiter.in_vain and waiter.until_s == math.inf:
                self._vain_until_s = trio.current_time() + waited_s
            raise NoSpace(f"no {format_size(waiter.size_bytes)} within {waited_s:.3f} s")

    async def _wait_in_line(self, waiter: _Waiter) -> None:
        """Return when *waiter* is decided; room that it is granted goes to no other waiter."""
        self._line[waiter] = None
        try:
            while waiter.pending:
                if next(iter(self._line)) is waiter:
                    await trio.sleep(self._pause_s)
                    if waiter.pending:
                        self._decide_all()
                else:
                    await waiter.turn.wait()
        finally:
            self._line.pop(waiter, None)  # still there if it was cancelled
            if self._line:
                next(iter(self._line)).turn.set()
            if waiter.granted is not None:
                waiter.granted.space.pledged_bytes -= waiter.size_bytes

    def _decide_all(self) -> None:
        """Look for room for all waiters, oldest first, and decide those that need not wait on."""
        reclaim, start_s = self._store.reclaim, trio.current_time()
        self._store.pool.background.work(_LOOK_S / 2)  # a scan or unlinks that we wait for
        reclaim.search_anew()
        prospects = _Prospects(self._store)
        exhausted: set[PoolDrive] = set()
        for waiter in list(self._line):
            waited_s, size_bytes = start_s - waiter.since_s, waiter.size_bytes
            try:
                granted = self._grant(waiter, exhausted)
            except NotAtHand:
                continue  # the device is freeing some
            if granted is not None:
                granted.space.pledged_bytes += size_bytes
                self._decide(waiter, granted)
                continue
            for drive in waiter.drives:
                if drive in exhausted:
                    continue
                exhausted.add(drive)
                fits = self._store.allocator.reach.fit(size_bytes, drive) is Fit.NOW
                if fits and waited_s > _PATIENCE_S and not reclaim.planning:
                    reclaim.evict_used(size_bytes - drive.space.unclaimed_bytes, drive)
                prospects.forget()
            hopes = list(prospects.of(waiter.drives))
            stays = waited_s <= _PATIENCE_S or any(hope.may_evict(size_bytes) for hope in hopes)
            late = (waiter.in_vain and not stays) or start_s >= waiter.until_s
            if late or not any(hope.worth_waiting(size_bytes, waited_s) for hope in hopes):
                self._decide(waiter, None)
        self._pause_s = max(_LOOK_S, _REST * (trio.current_time() - start_s))

    def _grant(self, waiter: _Waiter, exhausted: Container[PoolDrive]) -> PoolDrive | None:
        """Return a drive that has room for *waiter* now. Raises NotAtHand.

        All that could be evicted on *exhausted* drives went to an earlier waiter: others get what
        still fits.
        """
        for drive in waiter.drives:
            if drive in exhausted and waiter.size_bytes > drive.space.free_bytes:
                continue
            with contextlib.suppress(NoSpace):
                self._store.allocator.require_space(waiter.size_bytes, drive)
                return drive
        return None

    def _decide(self, waiter: _Waiter, granted: PoolDrive | None) -> None:
        waiter.pending, waiter.granted = False, granted
        del self._line[waiter]
        waiter.turn.set()
