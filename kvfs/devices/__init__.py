"""Devices: where a pool's bytes are stored. Public names; each kind has its own module."""

from kvfs.devices.device import Device, DirectoryReserve, Fill, SourceKind
from kvfs.devices.image import new_image_notes
from kvfs.devices.open_pool import open_drives, open_one_more, open_source
from kvfs.devices.pool_files import PoolHeader
from kvfs.devices.released import recognise, wait_released
from kvfs.devices.source import (
    destroy_source,
    format_drives,
    format_one_more,
    format_source,
    unmake_drive,
)

__all__ = [
    "Device",
    "DirectoryReserve",
    "Fill",
    "PoolHeader",
    "SourceKind",
    "destroy_source",
    "format_drives",
    "format_one_more",
    "format_source",
    "new_image_notes",
    "open_drives",
    "open_one_more",
    "open_source",
    "recognise",
    "unmake_drive",
    "wait_released",
]
