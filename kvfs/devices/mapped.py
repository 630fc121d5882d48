"""Which mappings of dm-crypt are open, by sysfs, and how a SOURCE says that it is encrypted.

Nothing is opened here, and no key is needed.
"""

import os
from typing import NamedTuple

from kvfs.core.encryption import MARK_BYTES, Lock, Way, parse_lock, way_of_mapping
from kvfs.core.errors import SourceDamaged
from kvfs.devices.busy import holders_of, kernel_name


class Mapping(NamedTuple):
    """An open mapping: its block device, what the device mapper calls it, and where its key is."""

    path: str
    name: str
    way: Way


def mapping_over(block_path: str) -> Mapping | None:
    """Return kvfs's own mapping on *block_path*, if it is open."""
    for holder in holders_of(block_path):
        name = _read(f"/sys/block/{holder}/dm/name")
        if (way := way_of_mapping(name)) is not None:
            return Mapping(f"/dev/{holder}", name, way)
    return None


def encrypted_below(path: str) -> str:
    """Return the device that the mapping *path* of kvfs's own encrypts; "" if it is none."""
    place = f"/sys/block/{kernel_name(path)}"
    if way_of_mapping(_read(f"{place}/dm/name")) is None:
        return ""
    return f"/dev/{os.listdir(f'{place}/slaves')[0]}"


def encryption_below(device_no: int) -> str:
    """Return what encrypts the file system with that st_dev.

    A Way, "dm-crypt" for a mapping that is not kvfs's, or "" for nothing.
    """
    place = f"/sys/dev/block/{os.major(device_no)}:{os.minor(device_no)}/dm"
    if not _read(f"{place}/uuid").startswith("CRYPT-"):
        return ""
    return way_of_mapping(_read(f"{place}/name")) or "dm-crypt"


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def lock_on(path: str) -> Lock | None:
    """Return how the device or file at *path* is encrypted, by its first bytes.

    None: not by kvfs. Raises SourceDamaged.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return parse_lock(file.read(MARK_BYTES) or b"")
    except OSError as error:
        raise SourceDamaged(f"{path}: {error.strerror}") from error
