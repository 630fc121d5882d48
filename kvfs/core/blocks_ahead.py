"""Blocks read ahead of their use, until they are used: how many bytes, and how many were worth it.

All of them together take at most a bound, and one tenant at most half of it. What nobody opens
within UNUSED_S was read in vain, as is what goes before it is used. What was in memory already is
counted, too: it cost a look. While less than half of what was tried was good for something, only
one in TRIED of what is foretold is tried. So a load without chains, or one from memory, costs next
to nothing.
"""

from collections.abc import Hashable
from enum import IntEnum
from typing import Final

from kvfs.core.types import InodeNo

#: Of all blocks together. They are in the page cache, from which the kernel takes what it needs.
AHEAD_MAX_BYTES: Final = 128 << 20
#: A client that loads a chain opens the next block within milliseconds.
UNUSED_S: Final = 10.0
#: Of what seems not to pay, one in so many is tried all the same: that may change.
TRIED: Final = 16
#: After so many results each counts half.
_HALVED_AFTER: Final = 64


class Got(IntEnum):
    """What became of a block that is to be read ahead; a thread tells."""

    ASKED = 0
    #: It is being read, or was.
    READ = 1
    #: All of it was in memory.
    CACHED = 2
    #: It cannot be read, or its client was faster.
    NOTHING = 3


class BlockAhead:
    """One block. Only ``got`` changes, in a thread."""

    __slots__ = ("asked_s", "got", "ino", "size_bytes", "tenant")

    def __init__(self, ino: InodeNo, size_bytes: int, tenant: Hashable, now_s: float) -> None:
        self.ino = ino
        self.size_bytes = size_bytes
        self.tenant = tenant
        self.asked_s = now_s
        self.got = Got.ASKED


class BlocksAhead:
    """The blocks of one pool, and counts since the server started."""

    def __init__(self, bytes_max: int = AHEAD_MAX_BYTES) -> None:
        self._bytes_max = bytes_max
        #: The first to be asked for first.
        self._blocks: dict[InodeNo, BlockAhead] = {}
        self._by: dict[Hashable, int] = {}
        #: What the blocks take.
        self.size_bytes = 0
        #: Blocks that were read, and of these the ones that were opened then, and not opened.
        self.read = self.read_bytes = self.used = self.wasted = 0
        #: Blocks that were in memory already.
        self.cached = 0
        self._good = self._results = self._skipped = 0

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def is_tried(self) -> bool:
        """Whether to read what is foretold now, by what that was good for lately."""
        if 2 * self._good >= self._results:
            return True
        self._skipped += 1
        return self._skipped % TRIED == 0

    def ask(
        self, ino: InodeNo, size_bytes: int, tenant: Hashable, now_s: float
    ) -> BlockAhead | None:
        """Return block *ino*, to be read for *tenant*; None if it is already, or finds no room."""
        own_bytes = self._by.get(tenant, 0) + size_bytes
        if ino in self._blocks or self.size_bytes + size_bytes > self._bytes_max:
            return None
        if 2 * own_bytes > self._bytes_max:
            return None
        block = self._blocks[ino] = BlockAhead(ino, size_bytes, tenant, now_s)
        self._by[tenant] = own_bytes
        self.size_bytes += size_bytes
        return block

    def opened(self, ino: InodeNo) -> None:
        """A client opened block *ino*, whatever block that is."""
        block = self._blocks.pop(ino, None)
        if block is not None:
            self._end(block, is_used=True)

    def drop(self, ino: InodeNo) -> None:
        """Block *ino* is gone."""
        block = self._blocks.pop(ino, None)
        if block is not None:
            self._end(block, is_used=False)

    def expire(self, now_s: float) -> None:
        """Give up those that nobody used for long."""
        for block in list(self._blocks.values()):
            if now_s - block.asked_s < UNUSED_S:
                break
            self.drop(block.ino)

    def _end(self, block: BlockAhead, *, is_used: bool) -> None:
        left_bytes = self._by[block.tenant] - block.size_bytes
        if left_bytes:
            self._by[block.tenant] = left_bytes
        else:
            del self._by[block.tenant]
        self.size_bytes -= block.size_bytes
        got, block.got = block.got, Got.NOTHING  # so that it is not read any more
        if got is Got.READ:
            self.read += 1
            self.read_bytes += block.size_bytes
            self.used += is_used
            self.wasted += not is_used
        elif got is Got.CACHED:
            self.cached += 1
        else:
            return
        self._good += got is Got.READ and is_used
        self._results += 1
        if self._results >= _HALVED_AFTER:
            self._good //= 2
            self._results //= 2
