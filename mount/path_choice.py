"""Which data path a mount takes, and why not the other one."""

import errno
import os
from typing import NamedTuple

from kvfs.devices import Device
from kvfs.errors import ToolMissing

_NEEDS = "needs Linux 6.9 or newer with CONFIG_FUSE_PASSTHROUGH"


class PathChoice(NamedTuple):
    """The path taken and the reason in words, for `kvfs status`."""

    passthrough: bool
    reason: str


def choose_path(wanted: str, device: Device, device_fd: int) -> PathChoice:
    """Choose by what the setting *wanted* and what the machine can.

    Raises ToolMissing when passthrough was demanded and is not to be had.
    """
    if wanted == "daemon":
        return PathChoice(False, "asked for by the setting data_path")
    obstacle = passthrough_obstacle(device, device_fd)
    if obstacle is None:
        return PathChoice(True, "the kernel and the backing file system allow it")
    if wanted == "passthrough":
        raise ToolMissing(f"passthrough is not to be had: {obstacle}; use --data-path=auto")
    return PathChoice(False, obstacle)


def passthrough_obstacle(device: Device, device_fd: int) -> str | None:
    """Return why passthrough cannot work here, None if nothing is known against it."""
    release = os.uname().release
    try:
        version = tuple(int(part) for part in release.split(".")[:2])
    except ValueError:
        version = (0, 0)
    if version < (6, 9):
        return f"Linux {release}: {_NEEDS}"
    del device, device_fd
    return None


def backing_obstacle(error: OSError) -> str:
    """Return what a refused backing id means (fs/fuse/backing.c)."""
    if error.errno == errno.EPERM:
        return "no CAP_SYS_ADMIN, or passthrough was not agreed"
    if error.errno == errno.ELOOP:
        return "the backing file system is stacked (overlayfs)"
    if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
        return _NEEDS
    return f"{os.strerror(error.errno or 0)}"
