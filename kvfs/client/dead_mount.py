"""A kvfs mount whose server is dead. It never works again, so it may be detached.

Clients keep the files that they have open on it, and it ends with its last user.
"""

import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvfs.client.control_socket import locked_directory
from kvfs.client.liveness import has_no_server, held_up_server, was_killed
from kvfs.client.servers import server_of
from kvfs.core.errors import MountpointUnusable
from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.machine.mount_table import Mount, kvfs_at, unmount

#: From the server's end to the end of its file system, which may have bytes to write back.
SOURCE_WAIT_S: Final = 10.0


class DeadMount(NamedTuple):
    """The topmost mount at its mountpoint."""

    mount: Mount
    held_up_pid: int
    """Its killed server, if the kernel still holds up a thread of it; else 0."""


def dead_mount_at(mountpoint: str) -> DeadMount | None:
    """Return the dead mount at the resolved path *mountpoint*.

    None if nothing is mounted, or if the server is not known to be dead.
    """
    present = kvfs_at(mountpoint)
    if present is None:
        return None
    server_pid = server_of(mountpoint)
    held_up_pid = server_pid if was_killed(server_pid) else held_up_server(mountpoint)
    ended = held_up_pid > 0 or has_no_server(mountpoint)
    return DeadMount(present, held_up_pid) if ended else None


def take_away(dead: DeadMount) -> None:
    """Detach *dead*, in use or not; no error if it is gone meanwhile. Raises MountpointUnusable.

    Calls that wait for the killed server end with an error.
    """
    mountpoint = dead.mount.mountpoint
    # If two servers start at once, neither must detach what the other has just mounted.
    with released(dead, "detach"), locked_directory(RUN_DIRECTORY):
        if dead_mount_at(mountpoint) == dead:
            try:
                unmount(mountpoint, lazy=True, force=dead.held_up_pid > 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise


@contextmanager
def released(dead: DeadMount, by: str) -> Iterator[None]:
    """Inside the ``with`` the mount *dead* goes; afterwards its server's locks are gone, too.

    They last until the process has ended. An OSError becomes MountpointUnusable: it cannot be done
    what *by* names.
    """
    pidfd = open_process(dead.held_up_pid)
    try:
        yield
        wait_for_end(pidfd, SOURCE_WAIT_S)
    except OSError as error:
        raise MountpointUnusable(
            f"{dead.mount.mountpoint}: cannot {by} the mount of a dead server: {error.strerror}"
        ) from None
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def open_process(pid: int) -> int:
    """Return a pidfd; -1 if there is no such process."""
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


def wait_for_end(pidfd: int, wait_s: float) -> bool:
    """Wait up to *wait_s* for the process behind *pidfd*; True if it has ended, or for -1."""
    if pidfd < 0:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
