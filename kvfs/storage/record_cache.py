"""Inode records lately read or written, parsed: a store asks for its directory's six times.

This process is the index's only writer, so that a record here is what the index says, pending rows
included. Bounded by count; a record takes some 600 bytes.
"""

from typing import Final

from kvfs.core.types import InodeRecord
from kvfs.storage.index_transaction import Rows

RECORDS_MAX: Final = 4096


class RecordCache(dict[bytes, InodeRecord]):
    """Records by the key of their row."""

    def remember(self, key: bytes, record: InodeRecord) -> None:
        """Keep *record*, in place of the one kept longest."""
        if len(self) >= RECORDS_MAX:
            del self[next(iter(self))]
        self[key] = record

    def learn(self, rows: Rows, records: dict[bytes, InodeRecord]) -> None:
        """Forget what *rows* changed, of which *records* are inode records."""
        for key in rows:
            if key in self:
                del self[key]
        for key, record in records.items():
            self.remember(key, record)
