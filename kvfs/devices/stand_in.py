"""What stands in for a drive that a pool lacks: an empty directory in memory.

It holds nothing, so all that the index says of the drive is a miss, and every part of a pool finds
a drive in its place. Nothing is put there (``Device.why_missing``).
"""

import os
from typing import Final

from kvfs.core.errors import SourceDamaged
from kvfs.core.source_list import by_uuid
from kvfs.core.types import DriveNo
from kvfs.devices.detached import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, mount_detached
from kvfs.devices.device import Device
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.syscalls import Syscalls

#: Why a drive that was removed is missing.
REMOVED: Final = "it was removed"
#: Two pages for a directory and INODES.
_OPTIONS: Final = {"size": "64k", "mode": "700"}


def stand_in(other: Device, drive: DriveNo, why: str, *, source: str = "") -> Device:
    """Return a device in the place of *drive* of *other*'s pool, which is missing because of *why*.

    *source*: where it should be, if that is known. Raises SourceDamaged if there can be none.
    """
    several = other.header.several
    assert several is not None, "a pool of one drive lacks none"
    uuid = several.drives[drive]
    try:
        pool_fd = _empty_directory()
    except OSError as error:
        raise SourceDamaged(
            f"{other.source}: its pool lacks drive {drive}, and nothing can stand in for it: "
            f"{error.strerror}"
        ) from error
    device = Device(
        kind=other.kind,
        source=source or by_uuid(uuid),
        fs_type=other.fs_type,
        header=other.header._replace(
            uuid=uuid,
            several=several._replace(drive=int(drive), draining=False),
            capacity_bytes=None,
        ),
        pool_fd=pool_fd,
        held_fds=[],
        usable_bytes=0,
        reserved_bytes=0,
        read_only=other.read_only,
    )
    device.why_missing = why
    return device


def _empty_directory() -> int:
    """Return an fd of a directory in memory that lives as long as it. Raises OSError."""
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    root_fd = mount_detached("tmpfs", "kvfs", _OPTIONS, (), attributes)
    try:
        pool_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root_fd)
    finally:
        os.close(root_fd)
    try:
        InodeNumbers.create(pool_fd, Syscalls())
    except BaseException:
        os.close(pool_fd)
        raise
    return pool_fd
