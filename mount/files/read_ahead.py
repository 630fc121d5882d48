"""How far the kernel reads ahead on the daemon path: several READs of 1 MiB.

By itself it asks for 128 KiB at a time (VM_READAHEAD_PAGES), and INIT can only lower that; a
setting of the mount's backing_dev_info raises it.
"""

import logging
from typing import Final

from kvfs.doctor.machine_rules import READ_AHEAD_WANTED_BYTES
from kvfs.machine.mount_table import kvfs_at

_log: Final = logging.getLogger(__name__)
#: Documentation/ABI/testing/sysfs-class-bdi in the kernel's sources.
_SETTING: Final = "/sys/class/bdi/{device}/read_ahead_kb"


def read_ahead_far(mountpoint: str) -> None:
    """Let the kernel read ahead far in the mount at *mountpoint*, if we may say so."""
    mount = kvfs_at(mountpoint)
    if mount is None:
        return  # gone already, or another has come above it
    try:
        with open(_SETTING.format(device=mount.device), "w", encoding="ascii") as setting:
            setting.write(str(READ_AHEAD_WANTED_BYTES >> 10))
    except OSError as error:
        _log.info("the kernel reads ahead as little as it does by itself: %s", error)
