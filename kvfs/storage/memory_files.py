"""Extents in memory: on a tmpfs beside the index, which outlives the server, but no reboot.

What a block has here its drive does not have yet. A file that is here is the truth, whatever its
drive has under its number: it goes by one rename, and from then on the file on the drive counts. So
a server that is killed between any two steps leaves one whole file, and the next one knows which.
"""

import contextlib
import os
import shutil
import threading
from collections import Counter
from itertools import islice
from typing import Final, Self

from kvfs.core.drives import ByDrive, Numbering
from kvfs.core.pool_layout import EXTENTS, file_name
from kvfs.core.types import STAT_BLOCK_BYTES, DriveNo, InodeNo
from kvfs.storage.fan_out import DIRECTORY_FLAGS, FanOut
from kvfs.storage.syscalls import Syscalls

#: The directory beside that of the index; what has left it lies in the second one.
_BLOCKS: Final = "blocks"
_LEFT: Final = "left"


def blocks_beside(index_dir: str) -> str:
    """Return the directory of extents that goes with the index in memory at *index_dir*."""
    return f"{os.path.dirname(index_dir)}/{_BLOCKS}"


def discard_blocks(index_dir: str) -> None:
    """Remove the extents beside the index at *index_dir*: no index knows them any more."""
    shutil.rmtree(blocks_beside(index_dir), ignore_errors=True)


class MemoryFiles:
    """The extents of one pool that are in memory, and what they hold there.

    The loop's thread adds and moves; any thread may ask, and ``forget``.
    """

    def __init__(self, index_dir: str, drives: int, syscalls: Syscalls) -> None:
        """Open what is beside the index at *index_dir*, or make it. Raises OSError."""
        path = blocks_beside(index_dir)
        for directory in (path, f"{path}/{_LEFT}"):
            with contextlib.suppress(FileExistsError):
                syscalls.mkdir(directory, 0o700)
        self._syscalls = syscalls
        self._drive = Numbering(drives).drive
        self._lock = threading.Lock()
        self._held: dict[InodeNo, int] = {}
        self._held_on: Counter[DriveNo] = Counter()
        self._fd = syscalls.open(path, DIRECTORY_FLAGS)
        try:
            self._left_fd = syscalls.open(_LEFT, DIRECTORY_FLAGS, dir_fd=self._fd)
        except BaseException:
            syscalls.close(self._fd)
            raise
        self.files: Final = FanOut(self._fd, EXTENTS, syscalls)
        self._find()

    @classmethod
    def found(
        cls, index_dir: str, drives: int, syscalls: Syscalls, *, makes: bool = False
    ) -> Self | None:
        """Return what an earlier server left beside the index at *index_dir*; None: nothing.

        *index_dir* is empty if the index is not in memory. *makes*: a place for more is made, if
        there is none. Raises OSError.
        """
        if not index_dir or not (makes or os.path.isdir(blocks_beside(index_dir))):
            return None
        return cls(index_dir, drives, syscalls)

    def _find(self) -> None:
        for name in os.listdir(self._left_fd):
            self._syscalls.unlink(name, dir_fd=self._left_fd)
        for ino in self.files.scan():
            status = self._syscalls.stat(file_name(ino), dir_fd=self.files.directory(ino))
            self.count(ino, status.st_blocks * STAT_BLOCK_BYTES)

    def close(self) -> None:
        """Close the directories."""
        self.files.close()
        for fd in (self._left_fd, self._fd):
            self._syscalls.close(fd)

    def __contains__(self, ino: object) -> bool:
        return ino in self._held

    def __len__(self) -> int:
        return len(self._held)

    def inos(self, most: int | None = None) -> list[InodeNo]:
        """Return the inodes, or *most* of them, those first that are here for longest."""
        with self._lock:  # any thread may forget one
            return list(islice(self._held, most))

    @property
    def held_bytes(self) -> int:
        """The memory that the extents take, as last counted."""
        return self._held_on.total()

    def bytes_of(self, ino: InodeNo) -> int:
        """Return the memory that *ino*'s extent takes, as last counted; 0 if it is not here."""
        return self._held.get(ino, 0)

    def held_for_bytes(self, drive: DriveNo) -> int:
        """Return the memory that extents of *drive*'s inodes take, as last counted."""
        return self._held_on[drive]

    def count(self, ino: InodeNo, size_bytes: int) -> None:
        """Note that *ino* is here, or is about to be made here, and takes *size_bytes*."""
        with self._lock:
            self._held_on[self._drive(ino)] += size_bytes - self._held.get(ino, 0)
            self._held[ino] = size_bytes

    def forget(self, ino: InodeNo) -> None:
        """Note that *ino*'s extent is not here any more, if it was."""
        with self._lock:
            self._held_on[self._drive(ino)] -= self._held.pop(ino, 0)

    def leave(self, ino: InodeNo) -> str:
        """From now on the file on its drive is *ino*'s extent; return what is to be removed.

        Raises OSError, and then nothing has changed.
        """
        name = file_name(ino)
        size_bytes = self._held[ino]
        self.forget(ino)  # whoever finds no file here asks again where it is
        try:
            from_fd = self.files.directory(ino)
            self._syscalls.rename(name, name, src_dir_fd=from_fd, dst_dir_fd=self._left_fd)
        except BaseException:
            self.count(ino, size_bytes)
            raise
        return name

    def remove(self, name: str) -> None:
        """Remove what ``leave`` returned; freeing its pages takes some ms. In any thread."""
        with contextlib.suppress(FileNotFoundError):
            self._syscalls.unlink(name, dir_fd=self._left_fd)


class ExtentPlaces:
    """Where an extent is: in memory, or on the drive of its inode."""

    def __init__(self, drives: ByDrive[FanOut], memory: MemoryFiles) -> None:
        self._on_drive = drives.of
        self._memory = memory
        self.all: Final = (*drives.all, memory.files)

    def of(self, ino: InodeNo) -> FanOut:
        """Return the directories that hold *ino*'s file. Raises Damaged."""
        return self._memory.files if ino in self._memory else self._on_drive(ino)
