"""Files that no name leads to, kept aside: strays for a while, and a few with wrong bytes.

``kvfs fsck`` lists both, a rebuild ignores them, and a start does not remove them.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.drives import ByDrive, Numbering
from kvfs.core.pool_layout import QUARANTINE, STRAYS, file_name, parse_file_name
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
    """The files in ``strays/`` of one pool: they have an identity but no inode in the index.

    A file's mtime is the time at which it was moved here.
    """

    def __init__(self, pool_fds: tuple[int, ...], syscalls: Syscalls, extents: Extents) -> None:
        """*pool_fds* are the directories of the pool's drives, by number."""
        self._pool_fds = ByDrive(pool_fds)
        self._syscalls = syscalls
        self._extents = extents

    def move_in(self, ino: InodeNo, now_ns: int, *, of_node: bool) -> Stray | None:
        """Move *ino*'s extent or identity file here; None if it is gone. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            self._syscalls.mkdir(STRAYS, 0o700, dir_fd=self._pool_fds.of(ino))
        name = file_name(ino)
        try:
            with self._directory(self._pool_fds.of(ino)) as strays_fd:
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
        for pool_fd in self._pool_fds.all:
            with contextlib.suppress(FileNotFoundError), self._directory(pool_fd) as strays_fd:
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
        pool_fd = self._pool_fds.of(ino)
        with contextlib.suppress(FileNotFoundError), self._directory(pool_fd) as strays_fd:
            fd = self._syscalls.open(name, _FILE_FLAGS, dir_fd=strays_fd)
            try:
                with contextlib.suppress(OSError):
                    if not self._extents.in_use(fd):
                        self._syscalls.ftruncate(fd, 0)
            finally:
                self._syscalls.close(fd)
            self._syscalls.unlink(name, dir_fd=strays_fd)

    @contextlib.contextmanager
    def _directory(self, pool_fd: int) -> Iterator[int]:
        """Open the directory, following no symlink; raises FileNotFoundError if it is missing."""
        fd = self._syscalls.open(STRAYS, DIRECTORY_FLAGS, dir_fd=pool_fd)
        try:
            yield fd
        finally:
            self._syscalls.close(fd)


_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class Quarantine:
    """Holds at most *files_max* extents and *most_bytes*; the oldest is removed for a new one."""

    def __init__(
        self, pool_fds: tuple[int, ...], syscalls: Syscalls, files_max: int = 0, most_bytes: int = 0
    ) -> None:
        """*pool_fds* are the directories of the pool's drives, by number."""
        self._pool_fds = ByDrive(pool_fds)
        self._serial = Numbering(len(pool_fds)).serial
        self._syscalls = syscalls
        self._files_max = files_max
        self._most_bytes = most_bytes

    def move_in(self, extents: Extents, ino: InodeNo) -> bool:
        """Move *ino*'s extent here. Raises OSError.

        Return False, and leave it where it is, if it is missing or too large, or none may be kept.
        """
        status = extents.stat(ino)
        if status is None or not self._files_max:
            return False
        size_bytes = status.st_blocks * STAT_BLOCK_BYTES
        if size_bytes > self._most_bytes:
            return False
        pool_fd = self._pool_fds.of(ino)
        with contextlib.suppress(FileExistsError):
            self._syscalls.mkdir(QUARANTINE, 0o700, dir_fd=pool_fd)
        self._make_room(size_bytes)
        with self._directory(pool_fd) as directory_fd:
            self._syscalls.rename(
                file_name(ino),
                file_name(ino),
                src_dir_fd=extents.directory(ino, of_node=False),
                dst_dir_fd=directory_fd,
            )
        return True

    def _make_room(self, size_bytes: int) -> None:
        held = self.held()
        while held and (
            len(held) >= self._files_max or sum(held.values()) + size_bytes > self._most_bytes
        ):
            oldest = min(held, key=self._serial)  # they rise with time
            self._remove(oldest)
            del held[oldest]

    def _remove(self, ino: InodeNo) -> None:
        with self._directory(self._pool_fds.of(ino)) as directory_fd:
            self._syscalls.unlink(file_name(ino), dir_fd=directory_fd)

    def held(self) -> dict[InodeNo, int]:
        """Return the inodes whose extents are here, with their allocated bytes. Raises OSError."""
        found: dict[InodeNo, int] = {}
        for pool_fd in self._pool_fds.all:
            with contextlib.suppress(FileNotFoundError), self._directory(pool_fd) as directory_fd:
                for name in self._syscalls.listdir(directory_fd):
                    ino = parse_file_name(name)
                    if ino is not None:
                        status = self._syscalls.stat(name, dir_fd=directory_fd)
                        found[ino] = status.st_blocks * STAT_BLOCK_BYTES
        return found

    def clear(self) -> None:
        """Remove all of them, because the device needs the space. Raises OSError."""
        for ino in self.held():
            self._remove(ino)

    @contextlib.contextmanager
    def _directory(self, pool_fd: int) -> Iterator[int]:
        fd = self._syscalls.open(QUARANTINE, _FLAGS, dir_fd=pool_fd)
        try:
            yield fd
        finally:
            self._syscalls.close(fd)
