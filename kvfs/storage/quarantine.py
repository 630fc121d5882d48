"""Keeps a few extents whose bytes are not what was stored, so that somebody can find out why.

No name leads to them. ``kvfs fsck`` lists them, and a start does not remove them.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from kvfs.core.pool_layout import QUARANTINE, file_name, parse_file_name
from kvfs.core.types import STAT_BLOCK_BYTES, InodeNo
from kvfs.storage.extents import Extents
from kvfs.storage.syscalls import Syscalls

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class Quarantine:
    """Holds at most *files_max* extents and *most_bytes*; the oldest is removed for a new one."""

    def __init__(
        self, pool_fd: int, syscalls: Syscalls, files_max: int = 0, most_bytes: int = 0
    ) -> None:
        self._pool_fd = pool_fd
        self._syscalls = syscalls
        self._files_max = files_max
        self._most_bytes = most_bytes

    def take(self, extents: Extents, ino: InodeNo) -> bool:
        """Move *ino*'s extent here. Raises OSError.

        Return False, and leave it where it is, if it is missing or too large, or none may be kept.
        """
        status = extents.stat(ino)
        if status is None or not self._files_max:
            return False
        size_bytes = status.st_blocks * STAT_BLOCK_BYTES
        if size_bytes > self._most_bytes:
            return False
        with contextlib.suppress(FileExistsError):
            self._syscalls.mkdir(QUARANTINE, 0o700, dir_fd=self._pool_fd)
        with self._directory() as directory_fd:
            self._make_room(directory_fd, size_bytes)
            self._syscalls.rename(
                file_name(ino),
                file_name(ino),
                src_dir_fd=extents.directory(ino, of_node=False),
                dst_dir_fd=directory_fd,
            )
        return True

    def _make_room(self, directory_fd: int, size_bytes: int) -> None:
        held = self.held()
        while held and (
            len(held) >= self._files_max or sum(held.values()) + size_bytes > self._most_bytes
        ):
            oldest = min(held)  # numbers rise with time
            self._syscalls.unlink(file_name(oldest), dir_fd=directory_fd)
            del held[oldest]

    def held(self) -> dict[InodeNo, int]:
        """Return the inodes whose extents are here, with their allocated bytes. Raises OSError."""
        found: dict[InodeNo, int] = {}
        try:
            with self._directory() as directory_fd:
                for name in self._syscalls.listdir(directory_fd):
                    ino = parse_file_name(name)
                    if ino is not None:
                        status = self._syscalls.stat(name, dir_fd=directory_fd)
                        found[ino] = status.st_blocks * STAT_BLOCK_BYTES
        except FileNotFoundError:
            pass
        return found

    def clear(self) -> None:
        """Remove all of them, because the device needs the space. Raises OSError."""
        held = self.held()
        if held:
            with self._directory() as directory_fd:
                for ino in held:
                    self._syscalls.unlink(file_name(ino), dir_fd=directory_fd)

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        fd = self._syscalls.open(QUARANTINE, _FLAGS, dir_fd=self._pool_fd)
        try:
            yield fd
        finally:
            self._syscalls.close(fd)
