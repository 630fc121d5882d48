"""Ready extents: created, preallocated and registered before a CREATE needs them.

A create on the hot path then allocates nothing. How many are kept follows the demand
(headroom.py); an extent that is not needed is unlinked. Everything runs on the loop's thread.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.changed import Changed, Why
from kvfs.core.errors import KvfsError, NoSpace
from kvfs.core.headroom import SizeForecast
from kvfs.core.settings import Settings
from kvfs.core.types import BackingId, InodeNo
from kvfs.machine.process_limits import ready_max
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.ports import Kernel
from kvfs.pool.space.space import Space
from kvfs.pool.space.unlink_queue import UnlinkQueue
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.inode_numbers import InodeNumbers

_log: Final = logging.getLogger(__name__)


class ReadyExtent(NamedTuple):
    """An unused extent: number, O_RDWR descriptor, reserve and backing id."""

    ino: InodeNo
    fd: int
    reserve_bytes: int
    backing_id: BackingId


class ReadyExtents:
    """Prepared extents, by the size they were preallocated to."""

    follows: Final = frozenset({Why.CLOSED, Why.STORED})

    def __init__(
        self,
        extents: Extents,
        numbers: InodeNumbers,
        background: Background,
        space: Space,
        settings: Settings,
        unlink_queue: UnlinkQueue,
        kernel: Kernel,
        open_inodes: OpenInodes,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._open_inodes = open_inodes
        self._monotonic_s = monotonic_s
        self._extents = extents
        self._unlink_queue = unlink_queue
        self._numbers = numbers
        self._background = background
        self._space = space
        self._settings = settings
        self.forecast = SizeForecast(settings.demand_directories_max)
        self._kernel = kernel
        self._queues: dict[int, deque[ReadyExtent]] = {}
        self._coming: dict[int, int] = {}
        self._ordered: set[InodeNo] = set()
        self._coming_bytes = 0
        self._depths: dict[int, int] = {}
        self.hits = 0
        self.misses = 0

    def follow(self, changed: Changed) -> None:
        """Tell the forecast the size of a draft that was closed."""
        opened, record = self._open_inodes.get(changed.ino), changed.after
        if opened is not None and record is not None and opened.created_in:
            # After a sparse file of a terabyte do not reserve a terabyte for the next one.
            size_bytes = min(record.size_bytes, record.allocated_bytes)
            self.forecast.note_published(opened.created_in, size_bytes, self._monotonic_s())
            opened.tell_size()

    def has(self, size_bytes: int) -> bool:
        """Whether an extent of *size_bytes* is ready."""
        return bool(self._queues.get(size_bytes))

    def give_out(self, size_bytes: int, now_s: float) -> ReadyExtent:
        """Return an extent with *size_bytes* allocated, for which the caller has made space.

        If the device has no space, nothing is allocated. Raises NoSpace, OSError.
        """
        self.forecast.note_created(size_bytes, now_s)
        queue = self._queues.get(size_bytes)
        if queue:
            extent = queue.popleft()
            self._space.ready_bytes -= extent.reserve_bytes
            self.hits += 1
            if len(queue) + self._coming.get(size_bytes, 0) < self._depths.get(size_bytes, 0):
                self._order(size_bytes)
            return extent
        self.misses += 1
        return self._prepare_now(size_bytes)

    def recall(self, ino: InodeNo, reserve_bytes: int) -> ReadyExtent:
        """Return the extent that a previous server took for *ino*. Raises Damaged, OSError."""
        fd = self._extents.open(ino, os.O_RDWR)
        try:
            return ReadyExtent(ino, fd, reserve_bytes, self._kernel.adopt(ino))
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
        os.close(extent.fd)

    def run_due(self, now_s: float, spendable_bytes: int) -> None:
        """Adjust the queues to the forecast; called a few times a second.

        *spendable_bytes*: how many bytes could be evicted if space were needed.
        """
        limit_bytes = int(self._settings.ready_share * self._space.capacity_bytes)
        space = self._space
        wanted = self.forecast.wanted(
            now_s,
            # A guess must not take the space that other writers need.
            limit_bytes=min(limit_bytes, (space.free_bytes + spendable_bytes) // 2),
            limit_extents=ready_max(self._settings.ready_extents_max),
        )
        self._depths = dict(wanted)
        for size_bytes in list(self._queues):
            queue = self._queues[size_bytes]
            while len(queue) > self._depths.get(size_bytes, 0):
                self._discard(queue.pop())
            if not queue:
                del self._queues[size_bytes]
        self.fill()

    def fill(self) -> None:
        """Order missing extents, as far as there is space."""
        for size_bytes, depth in self._depths.items():
            have = len(self._queues.get(size_bytes, ())) + self._coming.get(size_bytes, 0)
            for _ in range(depth - have):
                self._order(size_bytes)

    def give_way(self) -> None:
        """Drop all ready extents, because clients' data needs the space."""
        self._depths.clear()
        for queue in self._queues.values():
            while queue:
                self._discard(queue.pop())
        self._queues.clear()

    @property
    def count(self) -> int:
        """How many extents are ready now."""
        return sum(len(queue) for queue in self._queues.values())

    def numbers(self) -> set[InodeNo]:
        """Return the inode numbers of extents that are ready or ordered."""
        ready = {extent.ino for queue in self._queues.values() for extent in queue}
        return ready | self._ordered

    def _order(self, size_bytes: int) -> None:
        if size_bytes + self._coming_bytes > self._space.unclaimed_bytes:
            return
        try:
            ino = self._numbers.give_out()
        except OSError as error:
            _log.warning("no inode numbers for ready extents: %s", error)
            return
        self._coming[size_bytes] = self._coming.get(size_bytes, 0) + 1
        self._coming_bytes += size_bytes
        self._ordered.add(ino)
        self._background.submit(lambda: self._prepare(ino, size_bytes))

    def _prepare(self, ino: InodeNo, size_bytes: int) -> None:
        self._ordered.discard(ino)
        self._coming[size_bytes] -= 1
        self._coming_bytes -= size_bytes
        have = len(self._queues.get(size_bytes, ()))
        if size_bytes > self._space.unclaimed_bytes or have >= self._depths.get(size_bytes, 0):
            return  # the space was needed meanwhile, or the size is not in demand any more
        # Not counted earlier: a waiting order holds no blocks.
        self._space.ready_bytes += size_bytes
        try:
            extent = self._make(ino, size_bytes)
        except (KvfsError, OSError) as error:
            _log.warning("no ready extent of %d bytes: %s", size_bytes, error)
            self._space.ready_bytes -= size_bytes
        else:
            self._queues.setdefault(size_bytes, deque()).append(extent)

    def _prepare_now(self, size_bytes: int) -> ReadyExtent:
        try:
            return self._make(self._numbers.give_out(), size_bytes)
        except NoSpace:
            # The device is fuller than the capacity says: an empty extent may still fit.
            if not size_bytes:
                raise
            self.give_way()
            self._unlink_queue.hurry(self._space.capacity_bytes)
            return self._make(self._numbers.give_out(), 0)

    def _make(self, ino: InodeNo, size_bytes: int) -> ReadyExtent:
        fd = self._extents.create(ino, size_bytes)
        try:
            return ReadyExtent(ino, fd, size_bytes, self._kernel.adopt(ino))
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._extents.unlink(ino)
            raise

    def _discard(self, extent: ReadyExtent) -> None:
        self._space.ready_bytes -= extent.reserve_bytes
        self._unlink_queue.add(lambda: self._remove(extent), extent.reserve_bytes)

    def _remove(self, extent: ReadyExtent) -> None:
        if extent.backing_id:
            self._kernel.abandon(extent.backing_id)
        os.close(extent.fd)
        self._extents.unlink(extent.ino)
