"""Pinned files and directories, which are not evicted, and how many bytes they held.

A directory counts with what it held when it was pinned. A limit keeps a part of the pool evictable:
a pool that is all pins is full. It is checked here when a pin is set, and for each block as it
comes (ranks.py).
"""

import stat
from collections.abc import Iterator
from typing import Final

from kvfs.core.changed import Changed, Why
from kvfs.core.directory_policy import PIN
from kvfs.core.errors import NotPermitted
from kvfs.core.sizes import format_size
from kvfs.core.types import InodeNo, InodeRecord
from kvfs.storage.index import Index

#: Names in one step of counting; after a start a step runs between two requests.
_STEP: Final = 256
#: A directory with more names than this is pinned from the settings file, not by an attribute:
#: counting it here would keep every request waiting.
_COUNTED_MAX: Final = 100_000


class Pins:
    """The pins of one pool, by inode."""

    follows: Final = frozenset(
        {Why.ATTRIBUTED, Why.REPLACED, Why.REMOVED, Why.LOST, Why.EVICTED, Why.RECONCILED}
    )

    def __init__(self, index: Index) -> None:
        self._index = index
        self._pinned: dict[InodeNo, int] = {}
        #: Allocated bytes under all pins when they were set; used only for the limit.
        self.pinned_bytes = 0

    def __contains__(self, ino: InodeNo) -> bool:
        return ino in self._pinned

    def follow(self, changed: Changed) -> None:
        """Pin and unpin as the attribute says. It goes with the name when that goes to an heir.

        What a directory holds whose pin a power loss brought back is counted by the scan.
        """
        ino, record = changed.ino, changed.after
        if record is None:
            if changed.heir:
                self.move(ino, changed.heir)
            self.drop(ino)
        elif changed.gained.get(PIN) == b"1":
            is_file = not stat.S_ISDIR(record.mode)
            self.set(ino, record.allocated_bytes if is_file else changed.pinned_bytes)
        elif PIN in changed.lost:
            self.drop(ino)

    def held_bytes(self, ino: InodeNo) -> int | None:
        """Return the bytes that *ino* held when it was pinned; None if it is not."""
        return self._pinned.get(ino)

    def rows(self) -> list[tuple[InodeNo, int]]:
        """Return what is pinned, and the bytes that it held when it was pinned."""
        return list(self._pinned.items())

    def count(self, ino: InodeNo, record: InodeRecord, kept_bytes: int, limit_bytes: int) -> int:
        """Return what a pin of *ino* would keep beside the *kept_bytes* of all others.

        Raises NotPermitted beyond *limit_bytes*, except for what is pinned already.
        """
        size_bytes, is_all = self._held(ino, record)
        if not is_all:
            raise NotPermitted(f"more than {_COUNTED_MAX:,} names to count")
        others_bytes = max(kept_bytes, self.pinned_bytes)
        if ino not in self._pinned and others_bytes + size_bytes > limit_bytes:
            raise NotPermitted(
                f"pins would hold {format_size(others_bytes + size_bytes)}, and the limit is "
                f"{format_size(limit_bytes)} (pin_share)"
            )
        return size_bytes

    def set(self, ino: InodeNo, size_bytes: int) -> None:
        """Pin *ino*, which holds *size_bytes*."""
        self.pinned_bytes += size_bytes - self._pinned.get(ino, 0)
        self._pinned[ino] = size_bytes

    def drop(self, ino: InodeNo) -> None:
        """Unpin *ino*, if it was pinned."""
        self.pinned_bytes -= self._pinned.pop(ino, 0)

    def move(self, ino: InodeNo, fresh: InodeNo) -> None:
        """Move the pin of *ino*, if it has one, to *fresh*, with the same bytes."""
        size_bytes = self._pinned.get(ino)
        if size_bytes is not None:
            self.drop(ino)
            self.set(fresh, size_bytes)

    def learn(self, ino: InodeNo, record: InodeRecord) -> Iterator[None]:
        """Take over a pin from the index; it holds at once.

        Its bytes are counted in steps, one for each item of the iterator.
        """
        self.set(ino, 0)
        return self.recount(ino, record)

    def recount(self, ino: InodeNo, record: InodeRecord) -> Iterator[None]:
        """Count again what *ino* holds, a step for each item of the iterator."""
        if ino in self._pinned:
            self.set(ino, 0)
        for held_bytes, _ in self._count(ino, record):
            if ino not in self._pinned:  # unpinned meanwhile
                return
            self.set(ino, held_bytes)
            yield

    def _held(self, ino: InodeNo, record: InodeRecord) -> tuple[int, bool]:
        """Return the bytes below *ino*, and whether that is all: too many names are not counted."""
        held = (0, True)
        for so_far in self._count(ino, record):
            held = so_far
        return held

    def _count(self, ino: InodeNo, record: InodeRecord) -> Iterator[tuple[int, bool]]:
        """Count in steps; yield the bytes so far, and whether names are left out at the end."""
        if not stat.S_ISDIR(record.mode):
            yield record.allocated_bytes, True
            return
        held_bytes = counted = 0
        waiting = [ino]
        while waiting:
            for children in self._index.below(waiting.pop(), _STEP):
                counted += len(children)
                if counted > _COUNTED_MAX:
                    yield held_bytes, False
                    return
                for child, _ in children:
                    child_record = self._index.inode_or_miss(child)
                    if child_record is None:
                        continue
                    held_bytes += child_record.allocated_bytes
                    if stat.S_ISDIR(child_record.mode):
                        waiting.append(child)
                yield held_bytes, True
