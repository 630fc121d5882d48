"""Which data path a mount uses, why not the other one, and how far the kernel reads ahead on it."""

import errno
import logging
import os
import re
from typing import Final, NamedTuple

from kvfs.core.errors import ToolMissing
from kvfs.doctor.machine_rules import READ_AHEAD_WANTED_BYTES
from kvfs.machine.mount_table import kvfs_at

_log: Final = logging.getLogger(__name__)

#: FUSE passthrough came with this release (fs/fuse/passthrough.c).
_RELEASE_MIN: Final = (6, 9)
#: Documentation/ABI/testing/sysfs-class-bdi in the kernel's sources.
_READ_AHEAD: Final = "/sys/class/bdi/{device}/read_ahead_kb"
NOT_OFFERED: Final = "the kernel was built without CONFIG_FUSE_PASSTHROUGH"


class PathChoice(NamedTuple):
    """The path taken and the reason in words, for `kvfs status`."""

    passthrough: bool
    reason: str


def choose_path(wanted: str) -> PathChoice:
    """Choose by the setting *wanted* and by what the kernel's release can do.

    Raises ToolMissing when passthrough was demanded and is not available.
    """
    if wanted == "daemon":
        return PathChoice(passthrough=False, reason="asked for by the setting data_path")
    release = os.uname().release
    if _version(release) < _RELEASE_MIN:
        return without_passthrough(wanted, f"Linux {release} does not have it, 6.9 and later do")
    return PathChoice(passthrough=True, reason="the kernel and the backing file system allow it")


def without_passthrough(wanted: str, obstacle: str) -> PathChoice:
    """Return the daemon path, due to *obstacle*. Raises ToolMissing if *wanted* forbids it."""
    if wanted == "passthrough":
        raise ToolMissing(
            f"passthrough is not available: {obstacle}; --data-path=auto works without it"
        )
    return PathChoice(passthrough=False, reason=f"no passthrough: {obstacle}")


def backing_obstacle(error: OSError) -> str:
    """Return what a refused backing id means (fuse_backing_open in fs/fuse/backing.c)."""
    if error.errno == errno.EPERM:
        return "the server has no CAP_SYS_ADMIN"
    if error.errno == errno.ELOOP:
        return "the backing file system is stacked itself (overlayfs)"
    if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
        return NOT_OFFERED
    return os.strerror(error.errno or 0)


def read_ahead_far(mountpoint: str) -> None:
    """Have the kernel read ahead far in the mount at *mountpoint*, if we are allowed to set it.

    For the daemon path: by itself the kernel asks for 128 KiB at a time (VM_READAHEAD_PAGES), and
    INIT can only lower that. Several READs of 1 MiB are wanted.
    """
    mount = kvfs_at(mountpoint)
    if mount is None:
        return  # gone already, or another has come above it
    try:
        with open(_READ_AHEAD.format(device=mount.device), "w", encoding="ascii") as setting:
            setting.write(str(READ_AHEAD_WANTED_BYTES >> 10))
    except OSError as error:
        _log.info("kernel read-ahead not raised: %s", error)


def _version(release: str) -> tuple[int, int]:
    """Return (major, minor) of a kernel release; (0, 0) if it has another form."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
