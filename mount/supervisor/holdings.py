"""What the supervisor holds: open files by name, in systemd's store as well, and three figures.

It knows the meaning of two of the files only: without ``fuse`` no server can take over, and a write
to ``abort`` ends all calls on the mount.
"""

import contextlib
import json
import os
from typing import Final

from mount.supervisor.systemd import Systemd

_FUSE: Final = "fuse"
_ABORT: Final = "abort"
#: Our own: it holds the figures, and no server is given it.
_COUNTS: Final = "counts"
_COUNTS_MAX_BYTES: Final = 4096


class Holdings:
    """The open files of one mount."""

    def __init__(self, systemd: Systemd) -> None:
        """Take what *systemd* kept when the supervisor before us died."""
        self._systemd = systemd
        self.files = systemd.kept
        self.counts: dict[str, float] = {"restarts": 0, "upgrades": 0, "longest_pause_s": 0.0}
        self._counts_fd = self.files.pop(_COUNTS, -1)
        if self._counts_fd < 0:
            self._counts_fd = os.memfd_create("kvfs-counts", os.MFD_CLOEXEC)
            systemd.store(_COUNTS, self._counts_fd)
        with contextlib.suppress(ValueError):  # it is empty, or half of it was written
            self.counts.update(json.loads(os.pread(self._counts_fd, _COUNTS_MAX_BYTES, 0)))

    @property
    def can_go_on(self) -> bool:
        """Whether another server can take the place of one that has died."""
        return _FUSE in self.files

    def hold(self, name: str, fd: int) -> None:
        """Hold *fd* as *name*; a file that was held under that name is closed."""
        before = self.files.get(name)
        self.files[name] = fd
        if before is not None:
            os.close(before)
        self._systemd.store(name, fd)

    def drop(self, name: str) -> None:
        """Close what is held as *name*, if anything is."""
        fd = self.files.pop(name, None)
        if fd is not None:
            self._systemd.remove(name)
            os.close(fd)

    def drop_all(self) -> None:
        """Close everything."""
        for name in list(self.files):
            self.drop(name)
        self._systemd.remove(_COUNTS)

    def end_calls(self) -> None:
        """Make all calls on the mount end with an error, and close everything."""
        with contextlib.suppress(OSError):
            if _ABORT in self.files:
                os.write(self.files[_ABORT], b"1")
        self.drop_all()

    def note_counts(self) -> None:
        """Save the counts for a supervisor after us."""
        with contextlib.suppress(OSError):
            text = json.dumps(self.counts).encode()
            os.ftruncate(self._counts_fd, 0)
            os.pwrite(self._counts_fd, text, 0)
