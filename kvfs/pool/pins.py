"""Pinned files and directories, which are not evicted, and how many bytes they held.

A directory counts with the bytes that it held when it was pinned. A limit keeps a part of the pool
evictable, since a pool of pins alone is full. It is checked here when a pin is set, and in ranks.py
for each new block.
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

#: Names in one step of counting; after a start requests are handled between the steps.
_STEP: Final = 256
#: A directory with more names than this can be pinned only by the settings file, not by an
#: attribute: counting it here would keep every request waiting.
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
        """Pin or unpin by the attribute. A pin moves with the name if another inode inherits that.

        If a power loss brought back a directory's pin, the scan counts what the directory holds.
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
        """Return the bytes that *ino* held when it was pinned; None if it is not pinned."""
        return self._pinned.get(ino)

    def rows(self) -> list[tuple[InodeNo, int]]:
        """Return the pinned inodes, with the bytes that each held when it was pinned."""
        return list(self._pinned.items())

    def count(self, ino: InodeNo, record: InodeRecord, kept_bytes: int, limit_bytes: int) -> int:
        """Return how many bytes a pin of *ino* would keep; all others keep *kept_bytes*.

        Raises NotPermitted if that exceeds *limit_bytes* and *ino* is not pinned already, or if it
        has too many names to count.
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
        """Take over a pin from the index; it is in force at once.

        Its bytes are counted in steps, one for each item of the iterator.
        """
        self.set(ino, 0)
        return self.recount(ino, record)

    def recount(self, ino: InodeNo, record: InodeRecord) -> Iterator[None]:
        """Count the bytes of *ino* again, a step for each item of the iterator."""
        if ino in self._pinned:
            self.set(ino, 0)
        for held_bytes, _ in self._count(ino, record):
            if ino not in self._pinned:  # unpinned meanwhile
                return
            self.set(ino, held_bytes)
            yield

    def _held(self, ino: InodeNo, record: InodeRecord) -> tuple[int, bool]:
        """Return the bytes below *ino*, and whether all were counted; False with too many names."""
        held = (0, True)
        for so_far in self._count(ino, record):
            held = so_far
        return held

    def _count(self, ino: InodeNo, record: InodeRecord) -> Iterator[tuple[int, bool]]:
        """Count in steps; yield the bytes so far, and False at the end if names were left out."""
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
