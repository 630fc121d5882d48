"""What a client of a soak keeps open: readers, mappings and writers, over kills of the server too.

Each goes on to find the bytes of its opening, or an error of a dead mount: nothing else.
"""

import contextlib
import mmap
import os
from typing import Final

from tests.support.kills.soak.blocks import Blocks, copy_of, read_all
from tests.support.kills.soak.table import Found, Table

KEPT_MAX: Final = 6


class Kept:
    """A reader of block *number*, by descriptor or by mapping, opened when it was as *found*."""

    def __init__(self, number: int, fd: int, found: Found, change: int, epoch: int) -> None:
        self.number, self.found, self.epoch = number, found, epoch
        #: The last change of the name when it was opened.
        self.change = change
        self._fd = fd
        self._mapping: mmap.mmap | None = None

    def map(self) -> None:
        """Go on by a mapping alone."""
        self._mapping = mmap.mmap(self._fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        fd, self._fd = self._fd, -1
        os.close(fd)

    @property
    def is_mapped(self) -> bool:
        return self._mapping is not None

    def data(self) -> bytes:
        """Return what it finds. Raises OSError where a dead mount gives nothing."""
        return read_all(self._fd) if self._mapping is None else copy_of(self._mapping)

    def close(self) -> None:
        """Let go; a dead mount may refuse the close."""
        if self._mapping is not None:
            self._mapping.close()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


class KeptWriter:
    """The writer of block *number*, in place or, if there is one, under the name *temporary*."""

    def __init__(self, number: int, meant: Found, fd: int, temporary: str, epoch: int) -> None:
        self.number, self.meant, self.fd = number, meant, fd
        self.temporary, self.epoch = temporary, epoch
        self.written_bytes = 0

    def write_on(self, data: memoryview, most_bytes: int) -> None:
        """Write some more of its block, whose bytes are *data*."""
        part = data[self.written_bytes : self.written_bytes + most_bytes]
        self.written_bytes += os.pwrite(self.fd, part, self.written_bytes)

    def let_go(self) -> None:
        """Close it; a dead mount may refuse."""
        with contextlib.suppress(OSError):
            os.close(self.fd)


class Shelf:
    """All that one client keeps open for reading."""

    def __init__(self, table: Table, blocks: Blocks) -> None:
        self._table, self._blocks = table, blocks
        self.kept: list[Kept] = []
        self.counts = {"kept": 0, "kept_dead": 0}

    def keep(self, kept: Kept) -> None:
        """Take one more; the oldest goes."""
        self.kept.append(kept)
        if len(self.kept) > KEPT_MAX:
            self.kept.pop(0).close()

    def look(self, kept: Kept) -> str | None:
        """Return what is wrong with what *kept* finds."""
        before = self._table.epoch
        failed = None
        try:
            data = kept.data()
        except OSError as error:
            failed = repr(error)
        if failed is not None:
            changed = self._table.row(kept.number).shown > kept.change  # cut under a mapping
            if kept.epoch == self._table.epoch and not changed:
                how = "mapped" if kept.is_mapped else "open"
                return f"kept {how} {kept.number} ({kept.found}): {failed}"
            self._drop(kept)  # of a dead mount
            return None
        if self._table.row(kept.number).shown > kept.change:
            self._drop(kept)  # changed in place since
            return None
        self.counts["kept"] += 1
        self.counts["kept_dead"] += kept.epoch != before
        complaint = self._blocks.complaint(data, kept.found)
        if complaint is None:
            return None
        how = "mapped" if kept.is_mapped else "open"
        return f"kept {how} {kept.number} of epoch {kept.epoch} in {before}: {complaint}"

    def _drop(self, kept: Kept) -> None:
        self.kept.remove(kept)
        kept.close()

    def close(self) -> None:
        """Let go of everything."""
        for kept in self.kept:
            kept.close()
        self.kept.clear()
