"""A device taken over from the last server, with its open files: nothing is claimed or mounted.

The open files are the same, so claim, lock and mount never ended.
"""

from collections.abc import Sequence

from kvfs.core.errors import SourceForeign
from kvfs.devices.device import Device, Kind
from kvfs.devices.pool_files import read_header

Noted = tuple[Kind, str, str, int, int, str, bool, bool]


def noted_device(device: Device) -> Noted:
    """Return what the next server must know of *device*, beside its open files."""
    return (
        device.kind,
        device.source,
        device.fs_type,
        device.usable_bytes,
        device.reserved_bytes,
        device.superblock,
        device.outlived,
        device.read_only,
    )


def inherit_device(
    note: Noted, pool_fd: int, held_fds: Sequence[int], capacity_bytes: int | None
) -> Device:
    """Return the device of *note*, which ``noted_device`` of the last server returned.

    It takes over *pool_fd* and *held_fds*. Raises SourceForeign, FormatUnknown, UsageError.
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
        capacity_bytes=capacity_bytes,
        read_only=read_only,
        superblock=superblock,
    )
    device.outlived = outlived
    return device
