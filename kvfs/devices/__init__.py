"""Devices: where a pool's bytes are stored. Public names; each kind has its own module."""

from kvfs.devices.capacity import Reserve
from kvfs.devices.device import Device, Fill, Kind
from kvfs.devices.pool_files import PoolHeader
from kvfs.devices.source import (
    destroy_source,
    format_source,
    open_source,
    recognise,
    wait_released,
)

__all__ = [
    "Device",
    "Fill",
    "Kind",
    "PoolHeader",
    "Reserve",
    "destroy_source",
    "format_source",
    "open_source",
    "recognise",
    "wait_released",
]
