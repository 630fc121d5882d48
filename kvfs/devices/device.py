"""An open device: the fds that hold it, and how much of it blocks may use.

A server that takes over a mount gets the device with its open files. They are the same, so claim,
lock and mount never ended.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, Self

from kvfs.core.errors import SourceForeign, UsageError
from kvfs.core.settings import Settings
from kvfs.core.sizes import GIB, MIB, format_size
from kvfs.core.source_list import listed
from kvfs.core.types import round_up
from kvfs.devices.mapped import encryption_below
from kvfs.devices.pool_files import PoolHeader, read_header
from kvfs.storage.pool_run import RunPlace

#: The least space for blocks in a new directory pool. Less is of no use.
ROOM_MIN_BYTES: Final = 64 * MIB
#: mkfs.xfs (xfsprogs 5.19 and later) refuses anything smaller.
XFS_MIN_BYTES: Final = 300 * MIB
#: mkfs.xfs makes the log 1/2048 of the device within these bounds, and drops a last allocation
#: group below 16 MiB (xfs_mkfs.c, calculate_log_size and align_ag_geometry).
_XFS_LOG_PART: Final = 2048
_XFS_LOG_MIN_BYTES: Final = 64 * MIB
_XFS_LOG_MAX_BYTES: Final = 2 * GIB
_XFS_TAIL_BYTES: Final = 16 * MIB
#: No rule below may take more than this part of a small file system.
_SMALL_PART: Final = 4


class DirectoryReserve(NamedTuple):
    """What a directory source leaves to other users of its file system."""

    share: float = Settings().directory_reserve_share
    most_bytes: int = Settings().directory_reserve_bytes


def reserve_bytes(total_bytes: int, reserve: DirectoryReserve) -> int:
    """Return how many bytes of a parent file system blocks must leave free.

    At least 1 GiB, since a full file system stops not only kvfs, unless the settings or a quarter
    of the file system are less. A share of 0 reserves nothing.
    """
    if reserve.share <= 0:
        return 0
    wanted_bytes = min(max(GIB, int(total_bytes * reserve.share)), reserve.most_bytes)
    return min(wanted_bytes, total_bytes // _SMALL_PART)


def metadata_bytes(total_bytes: int) -> int:
    """Return the bytes that the index and the file system's inodes and trees may need.

    1 % is enough for 1.5 KiB of inode and index for every 150 KiB of blocks; 128 MiB are enough for
    the index's preallocation on small devices.
    """
    return min(max(128 * MIB, total_bytes // 100), total_bytes // _SMALL_PART)


def xfs_usable_bytes(size_bytes: int) -> int:
    """Return how many bytes blocks can use, at least, of an XFS made on *size_bytes*."""
    log_bytes = min(max(size_bytes // _XFS_LOG_PART, _XFS_LOG_MIN_BYTES), _XFS_LOG_MAX_BYTES)
    total_bytes = max(0, size_bytes - log_bytes - _XFS_TAIL_BYTES)
    return total_bytes - metadata_bytes(total_bytes)


def image_size_bytes(capacity_bytes: int) -> int:
    """Return the size, in whole MiB, of an image into which *capacity_bytes* of blocks fit."""
    size_bytes = max(capacity_bytes, XFS_MIN_BYTES)
    while (lacking_bytes := capacity_bytes - xfs_usable_bytes(size_bytes)) > 0:
        size_bytes = round_up(size_bytes + lacking_bytes, MIB)
    return size_bytes


SourceKind = Literal["block", "image", "directory"]

_KIND_WORDS: Final[dict[SourceKind, str]] = {
    "block": "block device",
    "image": "image file",
    "directory": "directory",
}


class Device:
    """One pool's device, held by this process from open_source to ``close``.

    It is the pool's first drive, and what stands in for it if that is missing.

    ``pool_fd`` is the pool directory, O_RDONLY|O_DIRECTORY. ``held_fds`` are all fds that keep
    the device claimed (mount, lock, image). The file system of a block device or image is unmounted
    when the last of them, and of all files opened below it, is closed. ``usable_bytes`` is the
    largest possible capacity; ``capacity_bytes`` is what blocks may use.
    """

    def __init__(
        self,
        *,
        kind: SourceKind,
        source: str,
        fs_type: str,
        header: PoolHeader,
        pool_fd: int,
        held_fds: list[int],
        usable_bytes: int,
        reserved_bytes: int,
        read_only: bool,
        superblock: str = "",
    ) -> None:
        """Take over the fds."""
        self.kind = kind
        self.source = source
        self.fs_type = fs_type
        self.pool_fd = pool_fd
        self.held_fds = held_fds
        self.epoch = header.epoch
        self.uuid = header.uuid
        self.created_ns = header.created_ns
        #: Its own; ``epoch`` is that of the whole pool.
        self.header = header
        self.read_only = read_only
        #: The mounted file system under a directory source (directory.py); empty if kvfs mounts the
        #: file system itself.
        self.superblock = superblock
        #: What an index in memory is called after that is made while this drive is the pool's
        #: first: copies of a pool have one UUID, and are never served at the same time, unless in
        #: other directories or file systems.
        status = os.fstat(pool_fd)
        self.index_id = f"{header.uuid} {superblock} {status.st_ino}"
        #: What encrypts this drive (``encryption_below``). Asked now: a drive may fail later.
        self.encrypted_by = encryption_below(status.st_dev)
        #: The pool's other drives, by their numbers from 1 on.
        self.more: tuple[Device, ...] = ()
        #: Why this drive of a pool of several is missing, and has a stand-in here (stand_in.py);
        #: empty if it is there.
        self.why_missing = ""
        #: Whether clients of a dead mount still have files on it open.
        self.outlived = False
        #: Whether its file system was cut off before this open: unsynced writes may be lost.
        self.cut_off = False
        self.usable_bytes = usable_bytes
        #: What the next server is told of this drive alone (``noted_device``).
        self.of_its_own = (usable_bytes, superblock)
        self.capacity_bytes = min(header.capacity_bytes or usable_bytes, usable_bytes)
        #: How many bytes blocks may use of each of the pool's drives, by number.
        self.capacities_bytes: tuple[int, ...] = (self.capacity_bytes,)
        self.reserved_bytes = reserved_bytes

    def take_in(self, others: "Sequence[Device]", capacity_bytes: int | None = None) -> None:
        """Make *others*, by number, the further drives of this one's pool; they close with it.

        *capacity_bytes* is that of the whole pool, in place of what its headers say: each drive has
        the part of it that it can hold of the whole. A missing one counts there as one that holds
        what the others do on average, and one that was removed not at all. Raises UsageError if
        that is too much.
        """
        drives = (self, *others)
        usable_bytes = sum(drive.usable_bytes for drive in drives)
        sizes_bytes = [drive.capacity_bytes for drive in drives]
        if capacity_bytes is not None:
            here = sum(not drive.why_missing for drive in drives)
            of_pool = sum(not drive.header.is_removed for drive in drives)
            whole_bytes = usable_bytes * of_pool // here
            if capacity_bytes > whole_bytes:
                raise UsageError(
                    f"{listed(drive.source for drive in drives)}: capacity "
                    f"{format_size(capacity_bytes)} is more than the {format_size(whole_bytes)} "
                    "that can hold blocks"
                )
            sizes_bytes = [capacity_bytes * drive.usable_bytes // whole_bytes for drive in drives]
        self.more = tuple(others)
        self.usable_bytes, self.capacities_bytes = usable_bytes, tuple(sizes_bytes)
        self.capacity_bytes = sum(sizes_bytes)
        self.superblock = "\n".join(drive.superblock for drive in drives).strip()
        self.outlived = any(drive.outlived for drive in drives)

    @property
    def missing(self) -> "tuple[Device, ...]":
        """What stands in for the drives that the pool lacks."""
        return tuple(one for one in self.drives if one.why_missing)

    @property
    def there(self) -> "tuple[Device, ...]":
        """The drives of the pool that it does not lack, by number; at least one."""
        return tuple(one for one in self.drives if not one.why_missing)

    @property
    def home(self) -> "Device":
        """The first of them: it has what only one drive has, an index in the pool say."""
        return self.there[0]

    @property
    def lacking(self) -> "tuple[Device, ...]":
        """Those of them that are drives of the pool still."""
        return tuple(one for one in self.missing if not one.header.is_removed)

    @property
    def sources(self) -> str:
        """Where the drives of the pool are, by number: as SOURCE of a command names them."""
        return listed(one.source for one in self.there)

    @property
    def drives(self) -> "tuple[Device, ...]":
        """The drives of the pool, by number."""
        return (self, *self.more)

    @property
    def encryption(self) -> str:
        """How all drives of the pool that are there are encrypted; empty if one is not."""
        ways = [one.encrypted_by for one in self.there]
        return ", ".join(sorted(set(ways))) if all(ways) else ""

    @property
    def pool_fds(self) -> tuple[int, ...]:
        """The directories of all drives of the pool, by number."""
        return (self.pool_fd, *(other.pool_fd for other in self.more))

    @property
    def run_places(self) -> tuple[RunPlace, ...]:
        """Where a RUN of the pool is: on each of its drives that is there."""
        return tuple(
            RunPlace(one.header.drive, one.pool_fd, one.of_its_own[1]) for one in self.there
        )

    @property
    def index_places(self) -> tuple[tuple[int, str], ...]:
        """Where an index may be: the directory of each drive that is there, home first, and its id.

        The id is ``index_id``.
        """
        return tuple((one.pool_fd, one.index_id) for one in self.there)

    def total_bytes(self) -> int:
        """Return the size of the file systems that hold the pool. Raises OSError."""
        there = map(os.fstatvfs, (one.pool_fd for one in self.there))
        return sum(space.f_blocks * space.f_frsize for space in there)

    def free_bytes(self) -> int:
        """Return what can still be allocated on this drive, less what is left to others there."""
        if self.why_missing:
            return 0
        space = os.fstatvfs(self.pool_fd)
        return max(0, space.f_bavail * space.f_frsize - self.reserved_bytes)

    def describe(self) -> str:
        """Return the device in words, for the log and ``kvfs status``."""
        what = f"{_KIND_WORDS[self.kind]} {self.sources}"
        key = f", encrypted: {self.encryption}" if self.encryption else ""
        return f"{what} ({self.fs_type}, capacity {format_size(self.capacity_bytes)}{key})"

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        for other in self.more:
            other.close()
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


Noted = tuple[SourceKind, str, str, int, int, str, bool, bool]


def noted_device(device: Device) -> Noted:
    """Return what the next server must know of *device*, without more drives, beside its files."""
    usable_bytes, superblock = device.of_its_own
    return (
        device.kind,
        device.source,
        device.fs_type,
        usable_bytes,
        device.reserved_bytes,
        superblock,
        device.outlived,
        device.read_only,
    )


def inherit_device(note: Noted, pool_fd: int, held_fds: Sequence[int]) -> Device:
    """Return the device of *note*, which ``noted_device`` of the last server returned.

    Others of its pool are to be taken in. It takes over *pool_fd* and *held_fds*. Raises
    SourceForeign, FormatUnknown.
    """
    kind, source, fs_type, usable_bytes, reserved_bytes, superblock, outlived, read_only = note
    header = read_header(pool_fd, source)
    if header is None:
        raise SourceForeign(f"{source}: its pool is gone")
    device = Device(
        kind=kind,
        source=source,
        fs_type=fs_type,
        header=header,
        pool_fd=pool_fd,
        held_fds=list(held_fds),
        usable_bytes=usable_bytes,
        reserved_bytes=reserved_bytes,
        read_only=read_only,
        superblock=superblock,
    )
    device.outlived = outlived
    return device
