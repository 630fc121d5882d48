"""One batch of the durability pass: blocks that nobody writes, opened by the device's thread."""

import functools
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.errors import Damaged
from kvfs.core.types import InodeNo
from kvfs.pool.durable.final_bytes import MAY_CHANGE
from kvfs.pool.durable.not_durable import Waiting
from kvfs.pool.pool import Pool

_log: Final = logging.getLogger(__name__)

#: Bounds of a batch: its descriptors, and bytes that take a good part of a second to write.
_BLOCKS_MAX: Final = 128
_BYTES_MAX: Final = 256 << 20
#: Blocks in one step on the loop, some 15 us each.
STEP: Final = 16


class OpenBlock(NamedTuple):
    """A block of a batch, with a descriptor to read it."""

    ino: InodeNo
    waiting: Waiting
    fd: int


class DurableBatch:
    """Gathers the blocks that are due, and has them until they are taken."""

    def __init__(self, pool: Pool, complete: Callable[[], None]) -> None:
        """*complete* is called when all blocks of a batch are open."""
        self._pool = pool
        self._queue = pool.durable.not_durable
        self._final_bytes = pool.durable.final_bytes
        self._complete = complete
        self._blocks: list[OpenBlock] = []
        self._size_bytes = 0
        self._due_before_s = 0.0
        #: How many blocks the device's thread is opening, and whether no more follow.
        self._opening, self._is_complete = 0, False
        #: Whether blocks are being gathered.
        self.gathers = False

    @property
    def is_full(self) -> bool:
        """Whether it takes no more blocks."""
        blocks = len(self._blocks) + self._opening
        return blocks >= _BLOCKS_MAX or self._size_bytes >= _BYTES_MAX

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of its blocks, in order."""
        return [block.fd for block in self._blocks]

    def begin(self, due_before_s: float) -> None:
        """Gather blocks that were published before *due_before_s*."""
        self._due_before_s = due_before_s
        self.gathers = True
        self._pool.background.submit(self._gather)

    def take_all(self) -> list[OpenBlock]:
        """Return its blocks, which are no longer its own."""
        blocks, self._blocks, self._size_bytes = self._blocks, [], 0
        return blocks

    def stop(self) -> list[OpenBlock]:
        """Gather no more, because the pool stops; return the blocks that are open."""
        self.gathers = self._is_complete = False
        return self.take_all()

    def _gather(self) -> None:
        """Take some blocks; begin with them when there are enough or no more are due."""
        if not self.gathers or self._is_complete:
            return
        for _ in range(STEP):
            first = self._queue.next_due()
            if first is None or first[1].since_s > self._due_before_s or self.is_full:
                self._is_complete = True
                self._end_if_open()
                return
            self._take(*first)
        self._pool.background.submit(self._gather)

    def _take(self, ino: InodeNo, waiting: Waiting) -> None:
        """Take *ino* into the batch, unless somebody may still write it. Atomic."""
        pool, queue = self._pool, self._queue
        opened = pool.open.inodes.get(ino)
        if opened is not None and opened.writers:
            queue.remove(ino)  # its last close publishes it
            return
        if not self._final_bytes.begin_open(ino):
            queue.hold(ino)
            return
        queue.begin(ino)
        self._opening += 1
        self._size_bytes += waiting.size_bytes
        pool.background.device.submit(
            functools.partial(self._open, ino), functools.partial(self._opened, ino, waiting)
        )

    def _open(self, ino: InodeNo) -> int | Exception:
        """Open *ino* in the device's thread; return why that failed, or a descriptor."""
        try:
            return self._final_bytes.open_unwritten(ino)
        except (Damaged, OSError) as error:
            return error

    def _opened(self, ino: InodeNo, waiting: Waiting, found: int | Exception) -> None:
        """Enter *ino*, unless it was written or removed meanwhile. Atomic."""
        queue = self._queue
        self._opening -= 1
        taken = queue.is_taken(ino, waiting)
        if isinstance(found, OSError):
            _log.warning("inode %#x is not durable yet: %s", ino, found)
            found = MAY_CHANGE
        if isinstance(found, Exception):
            if taken:
                queue.remove(ino)  # its next open finds the damage
        elif found == MAY_CHANGE:
            if taken:
                queue.put_back(ino)
                queue.hold(ino)
        else:
            self._final_bytes.note_open(ino, found)
            if taken:
                self._blocks.append(OpenBlock(ino, waiting, found))
            else:
                self._final_bytes.close(ino, found)
        self._end_if_open()

    def _end_if_open(self) -> None:
        if self._is_complete and not self._opening:
            self.gathers = self._is_complete = False
            self._complete()
