"""Our mount in the kernel: how it gets to its path, and how it goes.

It is unmounted only if it is ours, and then it tells if all its files were closed. A superblock
ends with its last mount and last open file, and the FUSE connection ends with it. A RELEASE that
the kernel has not sent by then is lost, but nobody is left who could write.

Where a dead mount is, the new one comes first, then the old one goes. At no moment is the path
bare, or programs would store in the directory below it, where the next mount hides what they
stored. A mount is put beneath the dead one, which is then detached. Where the kernel cannot (before
Linux 6.5), it is put over the dead one. That one cannot be detached without the mounts on top of
it, so it stays until those go.
"""

import contextlib
import logging
import os
import select
import time
from typing import Final

from kvfs.client.control_socket import locked_directory
from kvfs.client.dead_mount import DeadMount, dead_mount_at, released
from kvfs.core.errors import MountpointUnusable
from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.devices.detached import attach, attach_beneath, mount_detached
from kvfs.machine.mount_table import kvfs_at, mount_at, mounts, unmount
from mount.fuse import kernel

_log: Final = logging.getLogger(__name__)

#: Where the control file system, if it is mounted, shows each superblock by its minor number.
_CONNECTIONS: Final = "/sys/fs/fuse/connections"
_CONTROL_FS: Final = "fusectl"
#: How long it may still be shown: the kernel removes it right after it has ended the connection.
_GONE_WAIT_S: Final = 0.5
_LOOK_S: Final = 0.002


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


def open_abort(minor: str) -> int:
    """Open the file that ends the connection of mount number *minor*. Raises OSError."""
    root_fd = mount_detached(_CONTROL_FS, _CONTROL_FS, {}, (), 0, joins=True)
    try:
        return os.open(f"{minor}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=root_fd)
    finally:
        os.close(root_fd)


class OwnMount:
    """The mount at *mountpoint* that *device_fd* serves."""

    def __init__(self, device_fd: int, mountpoint: str) -> None:
        self._device_fd = device_fd
        self._mountpoint = mountpoint
        #: ``major:minor``; "" if the mount table did not tell.
        self._number = ""
        self._mounted = False
        self._unused = False
        #: A write ends the connection, and does nothing once that has ended (fuse_conn_abort_write
        #: in fs/fuse/control.c); -1: the kernel has no such file.
        self.abort_fd = -1

    def begun(self) -> None:
        """Note that it was mounted just now."""
        self._mounted = True
        with contextlib.suppress(OSError):
            present = kvfs_at(self._mountpoint)
            self._number = "" if present is None else present.device
            if self._number:
                self.abort_fd = open_abort(self._minor)

    def go_on(self, number: str, abort_fd: int) -> None:
        """Note that another server mounted it, as ``major:minor`` *number* with that *abort_fd*."""
        self._mounted, self._number, self.abort_fd = True, number, abort_fd

    @property
    def number(self) -> str:
        """Its ``major:minor``, "" if the mount table did not tell."""
        return self._number

    @property
    def device_number(self) -> int | None:
        """Its minor number, None if the mount table did not tell."""
        return int(self._minor) if self._minor else None

    def close(self) -> None:
        """Close ``abort_fd``: the connection need not be ended any more."""
        if self.abort_fd >= 0:
            os.close(self.abort_fd)
            self.abort_fd = -1

    def ended(self) -> None:
        """Note that the connection has ended: by ``unmount``, another's unmount, or an abort."""
        if self._mounted:
            self._mounted = False
            self._unused = self._is_down() and not self._is_listed()

    def unmount(self) -> None:
        """Unmount; a busy mount is detached, and its users get ENOTCONN once we are gone."""
        if not self._mounted:
            return
        self._mounted = False
        if not self._is_topmost():
            _log.warning("another mount is at %s now, and stays", self._mountpoint)
            return
        aborted = self._is_down()
        for lazy in (False, True):
            with contextlib.suppress(OSError):
                unmount(self._mountpoint, lazy=lazy)
                # The connection lives on if it is mounted elsewhere, too.
                self._unused = not lazy and not aborted and self._is_down()
                return

    def cut_off(self) -> None:
        """End the connection if it still lives, perhaps detached: nobody answers any more.

        Otherwise it would end with the last thread of this process. That thread may wait in the
        kernel for a client that waits for us (mount/fuse/kernel.py): neither would ever end.
        """
        if self.abort_fd >= 0 and not self._is_down():
            with contextlib.suppress(OSError):
                os.write(self.abort_fd, b"1")

    def is_unused(self) -> bool:
        """Whether all files on the mount are known to be closed; waits up to 0.5 s to find out.

        To be called at the end. False after an abort, or a forced or lazy umount while in use.
        """
        shown = os.path.join(_CONNECTIONS, self._minor)
        until_s = time.monotonic() + _GONE_WAIT_S
        while self._unused and self._number and os.path.lexists(shown):
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return self._unused

    @property
    def _minor(self) -> str:
        return self._number.rpartition(":")[2]

    def _is_down(self) -> bool:
        poll = select.poll()
        poll.register(self._device_fd, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))

    def _is_listed(self) -> bool:
        """Whether it may still be mounted somewhere."""
        if not self._number:
            return True
        try:
            return any(mount.device == self._number for mount in mounts())
        except OSError:
            return True

    def _is_topmost(self) -> bool:
        """Whether an unmount of the mountpoint would take ours away, as far as is known."""
        if not self._number:
            return True
        try:
            topmost = mount_at(self._mountpoint)
        except OSError:
            return True
        return topmost is not None and topmost.device == self._number
