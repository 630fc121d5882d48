"""Paths on a mount as the server knows them: below its mountpoint, without asking the kernel."""

from collections.abc import Sequence
from typing import NamedTuple

from kvfs.client.servers import answer_of, status_of
from kvfs.core.errors import NotMounted, UsageError
from kvfs.machine.mount_table import FS_TYPE, mount_of, resolve_mountpoint


class OnMount(NamedTuple):
    """Paths on one mount."""

    mountpoint: str
    socket: str
    paths: tuple[str, ...]
    """Below the mountpoint, "" for itself."""


def locate(paths: Sequence[str]) -> OnMount:
    """Return *paths* as one mount's server knows them. Raises NotMounted, UsageError."""
    found = [_below_mount(path) for path in paths]
    mountpoints = {mountpoint for mountpoint, _ in found}
    if len(mountpoints) != 1:
        raise UsageError(f"paths of one mount only, please: {', '.join(sorted(mountpoints))}")
    (mountpoint,) = mountpoints
    status_of(mountpoint)  # says what is wrong with a server that does not answer
    answer = answer_of(mountpoint)
    if answer is None:
        raise NotMounted(f"the server of {mountpoint} has just ended")
    return OnMount(mountpoint, answer.path, tuple(below for _, below in found))


def _below_mount(path: str) -> tuple[str, str]:
    absolute = resolve_mountpoint(path)
    mount = mount_of(absolute)
    if mount is not None and mount.fs_type == FS_TYPE:
        return mount.mountpoint, absolute[len(mount.mountpoint) :].strip("/")
    raise NotMounted(f"{path} is on no kvfs mount")
