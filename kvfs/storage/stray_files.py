"""Files that have an identity but no inode in the index: kept aside for a while, then removed.

No name leads to them, and a rebuild ignores them. A file's mtime is the time at which it was moved
here. ``kvfs fsck`` lists them.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.pool_layout import STRAYS, file_name, parse_file_name
from kvfs.core.types import STAT_BLOCK_BYTES, InodeNo
from kvfs.storage.extents import Extents
from kvfs.storage.fan_out import DIRECTORY_FLAGS
from kvfs.storage.syscalls import Syscalls

_FILE_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Stray(NamedTuple):
    """A file kept aside: its inode, its allocated bytes, and since when it is here (ns)."""

    ino: InodeNo
    size_bytes: int
    since_ns: int


class StrayFiles:
    """The files in ``strays/`` of one pool."""

    def __init__(self, pool_fd: int, syscalls: Syscalls, extents: Extents) -> None:
        self._pool_fd = pool_fd
        self._syscalls = syscalls
        self._extents = extents

    def take(self, ino: InodeNo, now_ns: int, *, of_node: bool) -> Stray | None:
        """Move *ino*'s extent or identity file here; None if it is gone. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            self._syscalls.mkdir(STRAYS, 0o700, dir_fd=self._pool_fd)
        name = file_name(ino)
        try:
            with self._directory() as strays_fd:
                from_fd = self._extents.directory(ino, of_node=of_node)
                self._syscalls.rename(name, name, src_dir_fd=from_fd, dst_dir_fd=strays_fd)
                self._syscalls.utime(name, ns=(now_ns, now_ns), dir_fd=strays_fd)
                status = self._syscalls.stat(name, dir_fd=strays_fd)
        except FileNotFoundError:
            return None
        return Stray(ino, status.st_blocks * STAT_BLOCK_BYTES, now_ns)

    def held(self) -> list[Stray]:
        """Return all files that are here, the oldest first. Raises OSError."""
        found: list[Stray] = []
        with contextlib.suppress(FileNotFoundError), self._directory() as strays_fd:
            for name in self._syscalls.listdir(strays_fd):
                ino = parse_file_name(name)
                if ino is not None:
                    status = self._syscalls.stat(name, dir_fd=strays_fd)
                    size_bytes = status.st_blocks * STAT_BLOCK_BYTES
                    found.append(Stray(ino, size_bytes, status.st_mtime_ns))
        return sorted(found, key=lambda stray: stray.since_ns)

    def remove(self, ino: InodeNo) -> None:
        """Remove a file; empty it first if only a dead mount may hold it. Raises OSError."""
        name = file_name(ino)
        with contextlib.suppress(FileNotFoundError), self._directory() as strays_fd:
            fd = self._syscalls.open(name, _FILE_FLAGS, dir_fd=strays_fd)
            try:
                with contextlib.suppress(OSError):
                    if not self._extents.in_use(fd):
                        self._syscalls.ftruncate(fd, 0)
            finally:
                self._syscalls.close(fd)
            self._syscalls.unlink(name, dir_fd=strays_fd)

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        """Open the directory, following no symlink; raises FileNotFoundError if it is missing."""
        fd = self._syscalls.open(STRAYS, DIRECTORY_FLAGS, dir_fd=self._pool_fd)
        try:
            yield fd
        finally:
            self._syscalls.close(fd)
