"""The ready extents of all drives of a pool, and the forecast that they follow."""

import math
from collections.abc import Callable
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.drives import ByDrive
from kvfs.core.headroom import SizeForecast
from kvfs.core.settings import Settings
from kvfs.core.types import InodeNo
from kvfs.pool.open.open_inodes import OpenInodes
from kvfs.pool.open.ports import Kernel
from kvfs.pool.open.ready_extents import ReadyExtent, ReadyExtents
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.background import Background
from kvfs.storage.extents import Extents
from kvfs.storage.inode_numbers import InodeNumbers


class ReadyByDrive:
    """A queue for each drive, as deep as the drive is of the pool."""

    follows: Final = frozenset({Why.CLOSED, Why.STORED})

    def __init__(
        self,
        extents: Extents,
        numbers: InodeNumbers,
        background: Background,
        drives: ByDrive[PoolDrive],
        settings: Settings,
        kernel: Kernel,
        open_inodes: OpenInodes,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._drives: Final = drives
        self._open_inodes = open_inodes
        self._monotonic_s = monotonic_s
        self.forecast = SizeForecast(settings.demand_directories_max)
        self.queues: Final = ByDrive(
            [
                ReadyExtents(
                    *(extents, numbers, background, drive, settings, kernel, self.forecast),
                    self._part_of(drive),
                )
                for drive in drives.all
            ]
        )

    def _part_of(self, drive: PoolDrive) -> Callable[[int], int]:
        """Return how many of so many extents are to be on *drive*; of each size at least one."""
        whole_bytes = sum(each.space.capacity_bytes for each in self._drives.all)
        share = drive.space.capacity_bytes / whole_bytes
        return lambda count: math.ceil(count * share)

    def follow(self, changed: Changed) -> None:
        """Tell the forecast the size of a draft that was closed."""
        opened, record = self._open_inodes.get(changed.ino), changed.after
        if opened is not None and record is not None and opened.created_in:
            # After a sparse file of a terabyte do not reserve a terabyte for the next one.
            size_bytes = min(record.size_bytes, record.allocated_bytes)
            self.forecast.note_published(opened.created_in, size_bytes, self._monotonic_s())
            opened.tell_size()

    def on(self, drive: PoolDrive) -> ReadyExtents:
        """Return those of *drive*."""
        return self.queues.all[drive.number]

    def recall(self, ino: InodeNo, reserve_bytes: int) -> ReadyExtent:
        """Return the extent that a previous server took for *ino*. Raises Damaged, OSError."""
        return self.queues.of(ino).recall(ino, reserve_bytes)

    def put_back(self, extent: ReadyExtent) -> None:
        """Take back an extent that was given out and that no client has used."""
        self.queues.of(extent.ino).put_back(extent)

    def let_go(self, extent: ReadyExtent) -> None:
        """Close the descriptor and backing id of a taken extent. The file stays with its inode."""
        self.queues.of(extent.ino).let_go(extent)

    def run_due(self, now_s: float, spendable_bytes: Callable[[PoolDrive], int]) -> None:
        """Adjust the queues to the forecast; called a few times a second.

        *spendable_bytes*: how many bytes could be evicted on a drive if space were needed.
        """
        drives = self._drives.all
        for drive in (drive for drive in drives if not drive.has_failed):
            if drive.is_draining:
                self.on(drive).give_up()  # what was ordered before has come meanwhile
            else:
                self.on(drive).run_due(now_s, spendable_bytes(drive), len(drives))

    def begin_serving(self) -> None:
        """Have some without a reserve made for the first creates."""
        for drive in self._drives.all:
            if not drive.is_draining:
                self.on(drive).begin_serving()

    def give_way(self) -> None:
        """Drop all ready extents of all drives."""
        for queue in self.queues.all:
            queue.give_way()

    @property
    def count(self) -> int:
        """How many extents are ready now."""
        return sum(queue.count for queue in self.queues.all)

    @property
    def hits(self) -> int:
        """How many creates found an extent ready."""
        return sum(queue.hits for queue in self.queues.all)

    @property
    def misses(self) -> int:
        """How many had to wait for theirs."""
        return sum(queue.misses for queue in self.queues.all)

    def numbers(self) -> set[InodeNo]:
        """Return the inode numbers of extents that are ready or ordered."""
        return set[InodeNo]().union(*(queue.numbers() for queue in self.queues.all))
