"""What the supervisor holds of a server's memory, for stores of a test that follow each other."""

import os
from typing import Final

from kvfs.core.settings import Settings
from kvfs.storage.journal import _DEEDS_START, _WAITING_START
from kvfs.storage.outliving import Outliving, undurable_rows_max

NAMES: Final = ("journal", "notes", "undurable", "evicted")


class OutlivingMemory:
    """The memfds; each store gets descriptors of its own."""

    def __init__(self) -> None:
        self._fds = {name: os.memfd_create(name) for name in NAMES}

    def at(self, settings: Settings) -> Outliving:
        """Return what the last store left there."""
        journal_fd, notes_fd, undurable_fd, evicted_fd = (os.dup(self._fds[name]) for name in NAMES)
        rows_max = undurable_rows_max(settings)
        return Outliving.at(journal_fd, notes_fd, undurable_fd, evicted_fd, rows_max)

    def empty(self, name: str) -> None:
        """Put an empty table in the place of *name*: the last server had none such."""
        os.close(self._fds[name])
        self._fds[name] = os.memfd_create(name)

    def forget_requests(self) -> None:
        """Empty the journal's list of the requests that were done; what it keeps of them stays."""
        size_bytes = _WAITING_START - _DEEDS_START
        os.pwrite(self._fds["journal"], bytes(size_bytes), _DEEDS_START)

    def close(self) -> None:
        """Let go of all."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
