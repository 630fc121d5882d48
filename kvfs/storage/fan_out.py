"""A fan-out: 256 directories with one file per inode. Directories stay open once they are used.

With an open directory, creating a file is one openat of a bare name.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from kvfs.core.pool_layout import (
    FAN_OUT,
    fan_out_name,
    file_name,
    parse_file_name,
)
from kvfs.core.types import InodeNo
from kvfs.storage.syscalls import Syscalls

DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class FanOut:
    """The 256 directories below ``extents`` or ``identities``, each held open once it is used.

    A missing directory is created with the first file in it.
    """

    def __init__(self, pool_fd: int, top: str, syscalls: Syscalls) -> None:
        self._pool_fd = pool_fd
        self._top = top
        self._syscalls = syscalls
        self._top_fd = -1
        self._fds = [-1] * FAN_OUT

    def directory(self, ino: InodeNo, *, make: bool = False) -> int:
        """Return the fd of *ino*'s directory. Raises FileNotFoundError unless *make*."""
        slot = ino & (FAN_OUT - 1)
        fd = self._fds[slot]
        return fd if fd >= 0 else self._keep(slot, make=make)

    def opened(self, ino: InodeNo) -> int:
        """Return the fd of *ino*'s directory if it is open, else -1."""
        return self._fds[ino & (FAN_OUT - 1)]

    def open_all(self) -> None:
        """Open all directories that there are. Raises OSError."""
        for slot in range(FAN_OUT):
            with contextlib.suppress(FileNotFoundError):
                self.directory(InodeNo(slot))

    def path(self, ino: InodeNo) -> str:
        """Return a path to *ino*'s file for the calls that take no dir_fd (xattrs)."""
        return f"/proc/self/fd/{self.directory(ino)}/{file_name(ino)}"

    def scan(self, directories: int = FAN_OUT) -> Iterator[InodeNo]:
        """Yield the inode number of every file, directory by directory, otherwise unordered.

        Only the first *directories* of the 256 are scanned; each has an equal share of the files.
        """
        for slot in range(directories):
            try:
                # An fd of its own: two readers of the shared one would share its position.
                fd = self._open(slot)
            except FileNotFoundError:
                continue
            try:
                names = self._syscalls.listdir(fd)
            finally:
                self._syscalls.close(fd)
            for name in names:
                ino = parse_file_name(name)
                if ino is not None:
                    yield ino

    def close(self) -> None:
        """Close the directories."""
        fds, self._fds = [*self._fds, self._top_fd], [-1] * FAN_OUT
        self._top_fd = -1
        for fd in fds:
            if fd >= 0:
                self._syscalls.close(fd)

    def _keep(self, slot: int, *, make: bool) -> int:
        try:
            fd = self._open(slot)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                self._syscalls.mkdir(self._top, 0o700, dir_fd=self._pool_fd)
            with contextlib.suppress(FileExistsError):
                self._syscalls.mkdir(fan_out_name(slot), 0o700, dir_fd=self._open_top())
            fd = self._open(slot)
        # Two threads may come here together. The assignment below is atomic under the GIL, and
        # the thread that finds the slot taken closes its own fd.
        if self._fds[slot] >= 0:
            self._syscalls.close(fd)
        else:
            self._fds[slot] = fd
        return self._fds[slot]

    def _open(self, slot: int) -> int:
        """Open directory *slot*, without following symlinks."""
        return self._syscalls.open(fan_out_name(slot), DIRECTORY_FLAGS, dir_fd=self._open_top())

    def _open_top(self) -> int:
        if self._top_fd < 0:
            fd = self._syscalls.open(self._top, DIRECTORY_FLAGS, dir_fd=self._pool_fd)
            if self._top_fd >= 0:  # another thread was first
                self._syscalls.close(fd)
            else:
                self._top_fd = fd
        return self._top_fd
