"""Rows of the index that are decided and read, but that LMDB has not got yet.

A draft's coming and going need not outlive a killed daemon: an extent without a row is a stray,
which the next start sweeps. So its rows wait here for the transaction that must last (the rename
that publishes it) or for the next tick. A store by rename then costs one commit instead of three,
and rows that came and went meanwhile none.
"""

from typing import Final

from kvfs.storage.index_transaction import Rows

#: More than this and the next transaction lasts, whatever it is.
PENDING_MAX: Final = 1024


class PendingRows(dict[bytes, bytes | None]):
    """Rows by key; None for one that is to go."""

    def keys_after(self, committed: list[bytes], prefix: bytes) -> list[bytes]:
        """Return which keys with *prefix* there are, given those that LMDB has."""
        found = [key for key in committed if self.get(key, b"") is not None]
        found += [key for key, raw in self.items() if raw is not None and key.startswith(prefix)]
        return found

    def with_rows(self, rows: Rows) -> Rows:
        """Return all rows that a commit of *rows* writes."""
        return {**self, **rows} if self else rows

    @property
    def full(self) -> bool:
        """Whether no more rows may wait."""
        return len(self) >= PENDING_MAX
