"""Which mount a control socket belongs to, and why its server does not answer."""

from typing import ClassVar

from kvfs.core.errors import ServeFailed
from kvfs.core.mount_name import name_of, socket_path
from kvfs.machine.device_wait import device_wait
from kvfs.machine.mount_table import FS_TYPE, Mount, mounts


class WaitsForDevice(ServeFailed):
    """The server does not answer, because the device below does not."""

    exit_code: ClassVar[int] = ServeFailed.exit_code


def mount_behind(path: str) -> Mount | None:
    """Return the mount of the server with the socket *path*, by its name; None if unknown."""
    for mount in mounts():
        if mount.fs_type == FS_TYPE and socket_path(name_of(mount.mountpoint)) == path:
            return mount
    return None


def no_answer(path: str, server_pid: int, waited_s: float) -> ServeFailed:
    """Return the error for server *server_pid* behind *path*, which did not answer in time."""
    late = f"{path}: no answer within {waited_s:g} s"
    wait = device_wait(server_pid)
    if wait is None:
        return ServeFailed(late)
    mount = mount_behind(path)
    device = "its device" if mount is None else f"its device {mount.source}"
    return WaitsForDevice(
        f"{late}: server {server_pid} waits in the kernel for {device} ({wait}). It goes on by "
        "itself when the device answers. Do not kill it: no signal ends it before"
    )
