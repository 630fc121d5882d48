"""Frees a mountpoint of dead mounts, or keeps one there until another server mounts.

An NFS server goes on serving a dead mount, until a command ends that.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvfs.client.dead_mount import SOURCE_WAIT_S, DeadMount, dead_mount_at, take_away
from kvfs.client.nfs.ganesha import exports_below, ganeshas, restart_of
from kvfs.client.nfs.nfsd import taken_exports
from kvfs.core.errors import CommandError
from kvfs.machine.mount_table import FS_TYPE, mounts


class Place(NamedTuple):
    """A mountpoint, after its dead mounts have released what they served."""

    lines: list[str]
    """One about each dead mount."""
    is_held: bool
    """Whether a dead mount is there, so that nothing is stored in the directory below."""


def free_place(mountpoint: str) -> None:
    """Detach every dead mount at the resolved path *mountpoint*. Raises MountpointUnusable."""
    for _ in range(_kvfs_mounted(mountpoint)):
        dead = dead_mount_at(mountpoint)
        if dead is None:
            return
        _let_go(dead, take_away)


def hold_place(mountpoint: str, stand_in: Callable[[DeadMount], None]) -> Place:
    """Release what the dead mounts at the resolved path *mountpoint* hold, and leave one there.

    *stand_in* replaces a dead mount by one that holds nothing. Afterwards a server may open what
    they served, and replace that one by its own mount (mount/fuse/kernel_mount.py). Raises
    MountpointUnusable.
    """
    lines: list[str] = []
    for left in reversed(range(_kvfs_mounted(mountpoint))):
        dead = dead_mount_at(mountpoint)
        if dead is None:
            return Place(lines, is_held=False)
        served = note_of_servers(mountpoint)  # now, while the open files still have this path
        _let_go(dead, take_away if left else stand_in)
        lines.append(f"replaces a dead mount of {dead.mount.source} at {mountpoint}{served}")
    return Place(lines, is_held=bool(lines))


def still_serving(mountpoint: str) -> Iterator[tuple[str, str]]:
    """Yield each NFS server of *mountpoint*, and the command that has it open the path anew.

    Both keep the file system they found there: nfsd until its caches are flushed (exportfs(8)),
    Ganesha until it ends. The path itself, which may hang, is not looked at.
    """
    if taken_exports(mountpoint):
        yield "the NFS server (nfsd)", "exportfs -f"
    for server in ganeshas(mountpoint):
        if server.open_files or exports_below(server, mountpoint):
            yield f"NFS-Ganesha (process {server.pid})", restart_of(server)


def note_of_servers(mountpoint: str) -> str:
    """Return clauses that say who still serves the dead mount at *mountpoint*; or "" if none do."""
    return "".join(
        f"; {who} still serves the dead one: `{command}` ends that"
        for who, command in still_serving(mountpoint)
    )


def _let_go(dead: DeadMount, by: Callable[[DeadMount], None]) -> None:
    from kvfs.devices import wait_released

    by(dead)
    with contextlib.suppress(CommandError):  # whoever opens it reports what is wrong
        wait_released(dead.mount.source, SOURCE_WAIT_S, joins=True)


def _kvfs_mounted(mountpoint: str) -> int:
    """Return how many kvfs mounts lie on top of each other there, from the topmost down."""
    count = 0
    for mount in mounts():
        if mount.mountpoint == mountpoint:
            count = count + 1 if mount.fs_type == FS_TYPE else 0
    return count
