"""Mounting where a dead mount is: the new one comes first, then the old one goes.

At no moment is the path bare, or programs would store in the directory below it, where the next
mount hides what they stored. A mount is put beneath the dead one, which is then detached. Where the
kernel cannot (before Linux 6.5), it is put over the dead one. That one cannot be detached without
the mounts on top of it, so it stays until those go.
"""

import os

from kvfs.client.control_socket import locked_directory
from kvfs.client.dead_mount import DeadMount, dead_mount_at, released
from kvfs.core.errors import MountpointUnusable
from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.devices.detached import attach, attach_beneath
from kvfs.machine.mount_table import kvfs_at, unmount
from mount.fuse import kernel
from mount.fuse.kernel_mount import open_abort


def place(root_fd: int, mountpoint: str) -> None:
    """Put the detached mount with the root *root_fd* at the resolved path *mountpoint*.

    Raises OSError, or MountpointUnusable if there is a kvfs mount that is not known to be dead.
    """
    # Locked, so that of two servers that start at once one finds the mount of the other.
    with locked_directory(RUN_DIRECTORY):
        present = kvfs_at(mountpoint)
        if present is None:
            attach(root_fd, mountpoint)
            return
        dead = dead_mount_at(mountpoint)
        if dead is None:
            raise MountpointUnusable(f"{mountpoint} is already a kvfs mount of {present.source}")
        if not _put_for(dead, root_fd):
            attach(root_fd, mountpoint)


def stand_in(dead: DeadMount) -> None:
    """Put an equally dead mount in the place of *dead*, which keeps nothing of the dead server.

    This frees the files that it registered with the kernel, and its device number, which the next
    mount is to have again. Calls that wait for the killed server end with an error. No error if
    *dead* is gone meanwhile; it stays if no mount can be put beneath it. Raises MountpointUnusable.
    """
    with released(dead, "replace"):
        device_fd = kernel.open_device()
        try:
            root_fd = kernel.detached(device_fd, dead.mount.source, read_only=False)
        finally:
            os.close(device_fd)  # so nobody ever serves it
        try:
            with locked_directory(RUN_DIRECTORY):
                if dead_mount_at(dead.mount.mountpoint) == dead and not _put_for(dead, root_fd):
                    _end_calls(dead)
        finally:
            os.close(root_fd)


def _put_for(dead: DeadMount, root_fd: int) -> bool:
    """Put a mount in the place of *dead*; False if the kernel cannot. The caller has the lock."""
    mountpoint = dead.mount.mountpoint
    if not attach_beneath(root_fd, mountpoint):
        return False
    unmount(mountpoint, lazy=True, force=dead.held_up_pid > 0)
    return True


def _end_calls(dead: DeadMount) -> None:
    if dead.held_up_pid > 0:
        abort_fd = open_abort(dead.mount.device.rpartition(":")[2])
        try:
            os.write(abort_fd, b"1")
        finally:
            os.close(abort_fd)
