"""The shared memory that outlives a server: journal, notes, and the table of undurable bytes."""

import os
from typing import NamedTuple, Self

from kvfs.core.settings import Settings
from kvfs.storage.journal import Journal
from kvfs.storage.notes import Notes
from kvfs.storage.undurable_table import UndurableTable


class Outliving(NamedTuple):
    """Journal, notes and table, and the memfds that hold them."""

    journal: Journal
    notes: Notes
    undurable: UndurableTable
    journal_fd: int
    notes_fd: int
    undurable_fd: int

    @classmethod
    def at(cls, journal_fd: int, notes_fd: int, undurable_fd: int, undurable_max: int) -> Self:
        """Use what the memfds hold; ``close`` closes them. Raises FormatUnknown, OSError.

        *undurable_max*: most rows in the table of what is not durable.
        """
        journal, notes = Journal(journal_fd), Notes(notes_fd)
        undurable = UndurableTable(undurable_fd, undurable_max)
        return cls(journal, notes, undurable, journal_fd, notes_fd, undurable_fd)

    @classmethod
    def fresh(cls, undurable_max: int) -> Self:
        """Create all three, empty. Raises OSError."""
        journal_fd, notes_fd = (_memory(name) for name in ("kvfs-journal", "kvfs-notes"))
        return cls.at(journal_fd, notes_fd, empty_undurable(), undurable_max)

    def close(self) -> None:
        """Unmap all three, and close the memfds."""
        self.journal.close()
        self.notes.close()
        self.undurable.close()
        for fd in (self.journal_fd, self.notes_fd, self.undurable_fd):
            os.close(fd)


def undurable_rows_max(settings: Settings) -> int:
    """Return how many rows are enough for waiting blocks and queued identities together."""
    return 2 * settings.durable_queue_max


def empty_undurable() -> int:
    """Return the descriptor of an empty table of what is not durable. Raises OSError."""
    return _memory("kvfs-undurable")


def _memory(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)
