"""Ready extents: created, preallocated and registered before a CREATE needs them.

A create on the hot path then allocates nothing. How many are kept follows the demand
(headroom.py); an extent that is not needed is unlinked. The device's thread makes and unlinks them;
all else runs on the loop's thread.
"""

import contextlib
import functools
import logging
import os
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Final, NamedTuple

from kvfs.core.errors import KvfsError, NoSpace, NotAtHand
from kvfs.core.headroom import SizeForecast
from kvfs.core.settings import Settings
from kvfs.core.sizes import format_size
from kvfs.core.types import BackingId, InodeNo
from kvfs.machine.process_limits import ready_max
from kvfs.pool.open.ports import Kernel
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.inode_numbers import InodeNumbers

_log: Final = logging.getLogger(__name__)

#: Extents without a reserve that are always kept while requests are served: a create for which
#: nothing is foreseen can begin with one, also while the device does not answer.
_EMPTY_READY: Final = 2
#: A create that finds no extent of its size has as many more made, twice as many each time.
_MORE_AT_FIRST: Final = 2
_MORE_AT_MOST: Final = 16


class ReadyExtent(NamedTuple):
    """An unused extent: number, O_RDWR descriptor, reserve and backing id."""

    ino: InodeNo
    fd: int
    reserve_bytes: int
    backing_id: BackingId


class ReadyExtents:
    """Prepared extents of one drive, by the size they were preallocated to."""

    def __init__(
        self,
        extents: Extents,
        numbers: InodeNumbers,
        background: Background,
        drive: PoolDrive,
        settings: Settings,
        kernel: Kernel,
        forecast: SizeForecast,
        part: Callable[[int], int] = lambda count: count,
    ) -> None:
        """*part*: how many of so many extents are to be ready on *drive*, by what it can hold."""
        self._extents = extents
        self._numbers = numbers
        self._background = background
        self._number, self._any_ino = drive.number, drive.ino
        self._device = background.drives.all[drive.number].device
        self._space = drive.space
        self._unlink_queue = drive.unlink_queue
        self._settings = settings
        self._kernel = kernel
        self._forecast = forecast
        self._part = part
        self._queues: dict[int, deque[ReadyExtent]] = {}
        #: What creates lacked and had made, since the last tick and since the one before. It is
        #: theirs: until they have asked again it does not give way.
        self._brought: list[ReadyExtent] = []
        self._brought_before: list[ReadyExtent] = []
        self._coming: dict[int, int] = {}
        self._ordered: set[InodeNo] = set()
        self._coming_bytes = 0
        self._depths: dict[int, int] = {}
        #: Sizes for which the device had no space since the last tick.
        self._refused: set[int] = set()
        self.hits = 0
        self.misses = 0

    def has(self, size_bytes: int) -> bool:
        """Whether an extent of *size_bytes* is ready."""
        return bool(self._queues.get(size_bytes)) or self.has_brought(size_bytes)

    def has_brought(self, size_bytes: int) -> bool:
        """Whether an extent of *size_bytes* was made for a create that lacked it."""
        if not (self._brought or self._brought_before):
            return False  # most of the time
        brought = chain(self._brought_before, self._brought)
        return any(extent.reserve_bytes == size_bytes for extent in brought)

    def _take_brought(self, size_bytes: int) -> ReadyExtent | None:
        """Return the oldest extent of *size_bytes* that was brought, None if there is none."""
        for brought in (self._brought_before, self._brought):
            for place, extent in enumerate(brought):
                if extent.reserve_bytes == size_bytes:
                    return brought.pop(place)
        return None

    def give_out(self, size_bytes: int, now_s: float, *, insists: bool = False) -> ReadyExtent:
        """Return an extent with *size_bytes* allocated, for which the caller has made space.

        If it *insists*, the device is asked again even if it has just refused such an extent.
        Raises NoSpace, NotAtHand, OSError.
        """
        queue = self._queues.get(size_bytes)
        extent = self._take_brought(size_bytes) if self._brought or self._brought_before else None
        if extent is None and not queue and self._background.is_serving:
            self._require_made(size_bytes, insists=insists)
        self._forecast.note_created(size_bytes, now_s)
        if extent is not None:
            self._space.ready_bytes -= extent.reserve_bytes
            return extent
        if queue:
            extent = queue.popleft()
            self._space.ready_bytes -= extent.reserve_bytes
            self.hits += 1
            if len(queue) + self._coming.get(size_bytes, 0) < self._depths.get(size_bytes, 0):
                self._order(size_bytes)  # made once no request waits
            return extent
        self.misses += 1
        return self._prepare_now(size_bytes)

    def _require_made(self, size_bytes: int, *, insists: bool) -> None:
        """Raise NotAtHand for an extent that is not ready; NoSpace if the device has no room."""
        if size_bytes in self._refused and not insists:
            raise NoSpace(f"the device has no {format_size(size_bytes)}")
        self._numbers.require(at_once=False, drive=self._number)
        raise NotAtHand(
            "a fresh extent",
            lambda: self._begin_missed(size_bytes, insists=insists),
            in_order=bool(self._refused),  # after what is being freed
            stores=True,
            ino=self._any_ino,
        )

    def _begin_missed(self, size_bytes: int, *, insists: bool) -> Callable[[], Callable[[], None]]:
        """Begin an extent that a create lacks, and have some more of its size made."""
        self.misses += 1
        depth = self._depths.get(size_bytes, 0)
        self._depths[size_bytes] = max(depth, min(2 * depth or _MORE_AT_FIRST, _MORE_AT_MOST))
        ino = self._numbers.give_out(self._number)
        self._begin(ino, size_bytes)
        self.fill()

        def make() -> Callable[[], None]:
            made = self._try_create(ino, size_bytes)
            return functools.partial(self._end_missed, ino, size_bytes, made, insists=insists)

        return make

    def _end_missed(
        self, ino: InodeNo, size_bytes: int, made: int | Exception, *, insists: bool
    ) -> None:
        error = self._end(ino, size_bytes, made)
        if error is None:
            self._brought.append(self._queues[size_bytes].pop())
        elif isinstance(error, NoSpace) and not insists:
            self._refuse(size_bytes)
        else:
            raise error

    def _refuse(self, size_bytes: int) -> None:
        """Give up what is ready: the device is fuller than the capacity says."""
        self._refused.add(size_bytes)
        self.give_way()
        self._unlink_queue.hurry(self._space.capacity_bytes)

    def recall(self, ino: InodeNo, reserve_bytes: int) -> ReadyExtent:
        """Return the extent that a previous server took for *ino*. Raises Damaged, OSError."""
        fd = self._extents.open(ino, os.O_RDWR)
        try:
            return ReadyExtent(ino, fd, reserve_bytes, self._kernel.adopt(fd))
        except BaseException:
            os.close(fd)
            raise

    def put_back(self, extent: ReadyExtent) -> None:
        """Take back an extent that ``give_out`` returned and that no client has used."""
        self._space.ready_bytes += extent.reserve_bytes
        self._queues.setdefault(extent.reserve_bytes, deque()).append(extent)

    def let_go(self, extent: ReadyExtent) -> None:
        """Close the descriptor and backing id of a taken extent. The file stays with its inode."""
        if extent.backing_id:
            self._kernel.abandon(extent.backing_id)
        self._device.submit(lambda: os.close(extent.fd))

    def run_due(self, now_s: float, spendable_bytes: int, drives: int = 1) -> None:
        """Adjust the queues to the forecast; called a few times a second.

        *spendable_bytes*: how many bytes could be evicted on the drive if space were needed;
        *drives*: among how many the pool's extents are shared.
        """
        limit_bytes = int(self._settings.ready_share * self._space.capacity_bytes)
        space = self._space
        wanted = self._forecast.wanted(
            now_s,
            # A guess must not take the space that other writers need.
            limit_bytes=min(limit_bytes, (space.free_bytes + spendable_bytes) // 2),
            limit_extents=ready_max(self._settings.ready_extents_max) // drives,
        )
        self._depths = {size_bytes: self._part(count) for size_bytes, count in wanted.items()}
        self._refused.clear()
        for extent in self._brought_before:
            self._queues.setdefault(extent.reserve_bytes, deque()).append(extent)
        self._brought_before, self._brought = self._brought, []
        if self._background.is_serving:
            self._depths[0] = max(_EMPTY_READY, self._depths.get(0, 0))
        for size_bytes in list(self._queues):
            queue = self._queues[size_bytes]
            while len(queue) > self._depths.get(size_bytes, 0):
                self._discard(queue.pop())
            if not queue:
                del self._queues[size_bytes]
        self.fill()

    def begin_serving(self) -> None:
        """Have some without a reserve made for the first creates."""
        self._depths[0] = max(_EMPTY_READY, self._depths.get(0, 0))
        self.fill()

    def fill(self) -> None:
        """Order missing extents, as far as there is space."""
        free_bytes = self._space.unclaimed_bytes - self._coming_bytes
        for size_bytes, depth in self._depths.items():
            have = len(self._queues.get(size_bytes, ())) + self._coming.get(size_bytes, 0)
            for _ in range(depth - have):
                if size_bytes <= free_bytes:
                    free_bytes -= size_bytes
                    self._order(size_bytes)

    def give_way(self) -> None:
        """Drop all ready extents, because clients' data needs the space.

        While requests are served, those that hold none stay.
        """
        serving = self._background.is_serving
        self._depths = {0: _EMPTY_READY} if serving else {}
        if not serving:
            self._brought_before += self._brought
            self._brought = []
        for size_bytes in list(self._queues):
            if size_bytes or not serving:
                for extent in self._queues.pop(size_bytes):
                    self._discard(extent)
        while self._brought_before and not serving:
            self._discard(self._brought_before.pop())

    def give_up(self) -> None:
        """Drop all, because nothing is put on the drive any more."""
        self._depths = {}
        extents = [*chain(*self._queues.values(), self._brought, self._brought_before)]
        self._queues, self._brought, self._brought_before = {}, [], []
        for extent in extents:
            self._discard(extent)

    @property
    def count(self) -> int:
        """How many extents are ready now."""
        brought = len(self._brought) + len(self._brought_before)
        return brought + sum(len(queue) for queue in self._queues.values())

    def numbers(self) -> set[InodeNo]:
        """Return the inode numbers of extents that are ready or ordered."""
        ready = {extent.ino for queue in self._queues.values() for extent in queue}
        brought = {extent.ino for extent in chain(self._brought, self._brought_before)}
        return ready | brought | self._ordered

    def _order(self, size_bytes: int) -> None:
        """Have one more made; whether there is space, and a number, is asked at its turn."""
        self._coming[size_bytes] = self._coming.get(size_bytes, 0) + 1
        self._coming_bytes += size_bytes
        self._background.submit(functools.partial(self._prepare, size_bytes))

    def _prepare(self, size_bytes: int) -> None:
        have = len(self._queues.get(size_bytes, ()))
        self._coming_bytes -= size_bytes
        fits = size_bytes <= self._space.unclaimed_bytes
        # Else the space was needed meanwhile, or the size is not in demand any more.
        wanted = fits and have < self._depths.get(size_bytes, 0)
        ino = self._new_number() if wanted else None
        if ino is None:
            self._coming[size_bytes] -= 1
            return
        self._begin(ino, size_bytes)
        self._device.submit(
            lambda: self._try_create(ino, size_bytes),
            functools.partial(self._end_ordered, ino, size_bytes),
            at_once=not have,  # a create may come before the next tick
        )

    def _new_number(self) -> InodeNo | None:
        """Return the number of a new extent; None if there is none now."""
        if self._device.is_crowded:
            return None  # it does not answer
        try:
            self._numbers.require(at_once=not self._background.is_serving, drive=self._number)
            return self._numbers.give_out(self._number)
        except NotAtHand:
            return None  # a thread fetches some
        except OSError as error:
            _log.warning("no inode numbers for ready extents: %s", error)
            return None

    def _end_ordered(self, ino: InodeNo, size_bytes: int, made: int | Exception) -> None:
        self._coming[size_bytes] -= 1
        error = self._end(ino, size_bytes, made)
        if error is not None:
            _log.warning("no ready extent of %d bytes: %s", size_bytes, error)

    def _prepare_now(self, size_bytes: int) -> ReadyExtent:
        try:
            return self._make(self._numbers.give_out(self._number), size_bytes)
        except NoSpace:
            self._refuse(size_bytes)
            raise

    # ---- making one: its beginning and its end on the loop, between them the device ----

    def _begin(self, ino: InodeNo, size_bytes: int) -> None:
        """Count the extent *ino*, before the device allocates it; a waiting order holds none."""
        self._ordered.add(ino)
        self._space.ready_bytes += size_bytes
        self._space.ordered_bytes += size_bytes

    def _try_create(self, ino: InodeNo, size_bytes: int) -> int | Exception:
        """Return the descriptor of a new extent, or why there is none; in any thread."""
        try:
            return self._extents.create(ino, size_bytes)
        except (KvfsError, OSError) as error:
            return error

    def _end(self, ino: InodeNo, size_bytes: int, made: int | Exception) -> Exception | None:
        """Enter the extent that was *made*; return why there is none."""
        self._ordered.discard(ino)
        self._space.ordered_bytes -= size_bytes
        if isinstance(made, int):
            try:
                extent = ReadyExtent(ino, made, size_bytes, self._kernel.adopt(made))
            except OSError as error:
                self._device.submit(functools.partial(self._undo, ino, made))
                made = error
            else:
                self._queues.setdefault(size_bytes, deque()).append(extent)
                return None
        self._space.ready_bytes -= size_bytes
        return made

    def _undo(self, ino: InodeNo, fd: int) -> None:
        os.close(fd)
        with contextlib.suppress(OSError):
            self._extents.unlink(ino)

    def _make(self, ino: InodeNo, size_bytes: int) -> ReadyExtent:
        fd = self._extents.create(ino, size_bytes)
        try:
            return ReadyExtent(ino, fd, size_bytes, self._kernel.adopt(fd))
        except BaseException:
            self._undo(ino, fd)
            raise

    def _discard(self, extent: ReadyExtent) -> None:
        self._space.ready_bytes -= extent.reserve_bytes
        if extent.backing_id:
            self._kernel.abandon(extent.backing_id)
        self._unlink_queue.add(lambda: self._remove(extent), extent.reserve_bytes)

    def _remove(self, extent: ReadyExtent) -> None:
        os.close(extent.fd)
        self._extents.unlink(extent.ino)
