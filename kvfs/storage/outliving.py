"""What of a server's memory outlives it: the journal and the notes, in shared memory."""

import os
from typing import NamedTuple, Self

from kvfs.storage.journal import Journal
from kvfs.storage.notes import Notes


class Outliving(NamedTuple):
    """Both, and the memfds in which they lie."""

    journal: Journal
    notes: Notes
    journal_fd: int
    notes_fd: int

    @classmethod
    def at(cls, journal_fd: int, notes_fd: int) -> Self:
        """Use what lies in the two memfds, which are closed with it. Raises FormatUnknown."""
        return cls(Journal(journal_fd), Notes(notes_fd), journal_fd, notes_fd)

    @classmethod
    def fresh(cls) -> Self:
        """Make both anew. Raises OSError."""
        names = ("kvfs-journal", "kvfs-notes")
        return cls.at(*(os.memfd_create(name, os.MFD_CLOEXEC) for name in names))

    def close(self) -> None:
        """Let go of them."""
        self.journal.close()
        self.notes.close()
        os.close(self.journal_fd)
        os.close(self.notes_fd)
