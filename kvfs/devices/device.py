"""An open device: the fds that hold it, and its sizes."""

import os
from collections.abc import Callable
from typing import Final, Literal, Self

from kvfs.core.errors import UsageError
from kvfs.core.sizes import format_size
from kvfs.devices.pool_files import PoolHeader

Kind = Literal["block", "image", "directory"]

_KIND_WORDS: Final[dict[Kind, str]] = {
    "block": "block device",
    "image": "image file",
    "directory": "directory",
}


class Device:
    """One pool's device, held by this process from open_source to ``close``.

    ``pool_fd`` is the pool directory, O_RDONLY|O_DIRECTORY. ``held_fds`` are all fds that keep
    the device claimed (mount, lock, image). The file system of a block device or image is unmounted
    when the last of them, and of all files opened below it, is closed. ``usable_bytes`` is the
    largest possible capacity; ``capacity_bytes`` is what blocks may use.
    """

    def __init__(
        self,
        *,
        kind: Kind,
        source: str,
        fs_type: str,
        header: PoolHeader,
        pool_fd: int,
        held_fds: list[int],
        usable_bytes: int,
        reserved_bytes: int,
        capacity_bytes: int | None,
        read_only: bool,
        superblock: str = "",
    ) -> None:
        """Take over the fds. *capacity_bytes* overrides the header's. Raises UsageError."""
        if capacity_bytes is not None and capacity_bytes > usable_bytes:
            raise UsageError(
                f"{source}: capacity {format_size(capacity_bytes)} is more than the "
                f"{format_size(usable_bytes)} that can hold blocks"
            )
        self.kind = kind
        self.source = source
        self.fs_type = fs_type
        self.pool_fd = pool_fd
        self.held_fds = held_fds
        self.epoch = header.epoch
        self.uuid = header.uuid
        self.created_ns = header.created_ns
        self.read_only = read_only
        #: The mounted file system under a directory source (parent_fs.py); empty if kvfs mounts the
        #: file system itself.
        self.superblock = superblock
        #: Whether clients of a dead mount still have files on it open.
        self.outlived = False
        self.usable_bytes = usable_bytes
        self.capacity_bytes = min(
            capacity_bytes or header.capacity_bytes or usable_bytes, usable_bytes
        )
        self.reserved_bytes = reserved_bytes

    def total_bytes(self) -> int:
        """Return the size of the file system that holds the pool. Raises OSError."""
        space = os.fstatvfs(self.pool_fd)
        return space.f_blocks * space.f_frsize

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated, less what a directory leaves to others."""
        space = os.fstatvfs(self.pool_fd)
        return max(0, space.f_bavail * space.f_frsize - self.reserved_bytes)

    def describe(self) -> str:
        """Return the device in words, for the log and ``kvfs status``."""
        what = f"{_KIND_WORDS[self.kind]} {self.source}"
        return f"{what} ({self.fs_type}, capacity {format_size(self.capacity_bytes)})"

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        fds, self.held_fds = [self.pool_fd, *self.held_fds], []
        if self.pool_fd >= 0:
            self.pool_fd = -1
            for fd in fds:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Writes the content of a new pool directory (index, inode numbers) and makes it durable.
Fill = Callable[[int], None]
