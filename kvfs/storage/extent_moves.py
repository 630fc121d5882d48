"""Copies an extent from memory to the drive of its inode, where it appears whole or not at all.

The copy has no name until its bytes are in it (O_TMPFILE, open(2)). It counts only once its file in
memory has left (memory_files.py): until then it can be undone, and a start after a kill does so.
"""

import contextlib
import errno
import os
from typing import Final

from kvfs.core.drives import ByDrive
from kvfs.core.errors import SPACE_ERRORS
from kvfs.core.pool_layout import file_name
from kvfs.core.types import STAT_BLOCK_BYTES, InodeNo, round_up
from kvfs.storage.fan_out import FanOut
from kvfs.storage.syscalls import FALLOC_FL_KEEP_SIZE, Syscalls

#: Bytes in one sendfile(2), which ends early only for a signal.
_PIECE_BYTES: Final = 16 << 20


class ExtentMoves:
    """The copies on the drives of one pool. All methods may run in threads."""

    def __init__(self, drives: ByDrive[FanOut], syscalls: Syscalls) -> None:
        self._of: Final = drives.of
        self._syscalls = syscalls

    def copy(self, ino: InodeNo, fd: int) -> int:
        """Copy the extent behind *fd*, which nobody writes; return the bytes allocated for it.

        Bytes, holes, reserve and times are the same, and the drive has none of it durably. Raises
        NoSpace, Damaged, OSError.
        """
        with SPACE_ERRORS:
            directory_fd = self._of(ino).directory(ino, make=True)
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            to_fd = self._syscalls.open(".", flags, 0o600, dir_fd=directory_fd)
            try:
                self._fill(fd, to_fd)
                self._name(to_fd, ino, directory_fd)
                return self._syscalls.fstat(to_fd).st_blocks * STAT_BLOCK_BYTES
            finally:
                self._syscalls.close(to_fd)

    def open(self, ino: InodeNo) -> int:
        """Open the copy of *ino*, O_RDWR. Raises Damaged, OSError."""
        directory_fd = self._of(ino).directory(ino)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOATIME | os.O_NOFOLLOW
        return self._syscalls.open(file_name(ino), flags, dir_fd=directory_fd)

    def _fill(self, fd: int, to_fd: int) -> None:
        calls, status = self._syscalls, self._syscalls.fstat(fd)
        held_bytes = status.st_blocks * STAT_BLOCK_BYTES
        if held_bytes >= round_up(status.st_size) and held_bytes:  # no holes
            calls.fallocate(to_fd, FALLOC_FL_KEEP_SIZE, 0, held_bytes)
        at_bytes = 0
        while at_bytes < status.st_size:
            try:
                at_bytes = calls.lseek(fd, at_bytes, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break
            end_bytes = calls.lseek(fd, at_bytes, os.SEEK_HOLE)
            calls.lseek(to_fd, at_bytes, os.SEEK_SET)
            while at_bytes < end_bytes:
                piece_bytes = min(_PIECE_BYTES, end_bytes - at_bytes)
                sent_bytes = calls.sendfile(to_fd, fd, at_bytes, piece_bytes)
                if not sent_bytes:
                    raise OSError(errno.EIO, "an extent in memory became shorter")
                at_bytes += sent_bytes
        calls.ftruncate(to_fd, status.st_size)
        calls.utime(to_fd, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _name(self, to_fd: int, ino: InodeNo, directory_fd: int) -> None:
        """Give the copy its name; one that a killed server left goes."""
        path, name = f"/proc/self/fd/{to_fd}", file_name(ino)
        try:
            self._syscalls.link(path, name, dst_dir_fd=directory_fd, follow_symlinks=True)
        except FileExistsError:
            self.undo(ino)
            self._syscalls.link(path, name, dst_dir_fd=directory_fd, follow_symlinks=True)

    def undo(self, ino: InodeNo) -> None:
        """Remove the copy of *ino*, if there is one. Raises Damaged, OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._syscalls.unlink(file_name(ino), dir_fd=self._of(ino).directory(ino))
