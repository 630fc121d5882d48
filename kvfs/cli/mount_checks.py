"""What must hold before a mount touches anything; each failure is one line that names it."""

import os
import stat
import sys
from collections.abc import Callable
from typing import Final

import kvfs
from kvfs.cli.dead_place import hold_place
from kvfs.client.dead_mount import DeadMount
from kvfs.core.errors import MountpointUnusable, UsageError
from kvfs.core.mount_name import CONFIG_DIRECTORY, LOG_DIRECTORY, RUN_DIRECTORY
from kvfs.core.settings import Settings
from kvfs.core.source_list import is_by_uuid, sources_of
from kvfs.doctor.below_mount import below, told, uncovered
from kvfs.machine.mount_table import kvfs_at, mount_of, resolve_mountpoint
from kvfs.machine.mountpoint_guard import guard
from kvfs.machine.process_limits import accounts_of

#: Directories of the kernel, the sockets, the settings and the logs.
_NEEDED: Final = ("/proc", "/sys", "/dev", RUN_DIRECTORY, CONFIG_DIRECTORY, LOG_DIRECTORY)
#: kvfs, Python, and what these and the tools of XFS load; later servers are started from there.
_PROGRAMS: Final = (
    *(os.path.dirname(kvfs.__file__), sys.prefix, sys.base_prefix),
    *("/bin", "/sbin", "/lib", "/usr"),
)
#: File systems in which only the kernel makes names.
_THE_KERNELS_OWN: Final = frozenset(
    [
        *("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "cpuset", "securityfs"),
        *("selinuxfs", "smackfs", "debugfs", "tracefs", "configfs", "fusectl", "bpf", "pstore"),
        *("efivarfs", "binfmt_misc", "mqueue", "hugetlbfs", "resctrl", "nsfs", "nfsd"),
        *("rpc_pipefs", "autofs"),
    ]
)


def prepare_mountpoint(
    mountpoint: str, stand_in: Callable[[DeadMount], None], *, guarded: bool
) -> list[str]:
    """Release dead mounts at the resolved path *mountpoint*; return lines for the operator.

    What *stand_in* puts there stays until the new mount is there, so that nothing is stored below.
    *guarded* keeps the directory from being written to while nothing is mounted there. Raises
    MountpointUnusable if nothing can be mounted there.
    """
    lines, is_held = hold_place(mountpoint, stand_in)
    if not is_held:
        _check_directory(mountpoint)
    if files := told(below(mountpoint)):
        lines.append(
            f"{mountpoint} is not empty: {files}, stored while nothing was mounted there, stay on "
            f"the file system below and are hidden by the mount; `kvfs doctor {mountpoint}` shows "
            "how to reach them"
        )
    if guarded and (why := _guard(mountpoint) if is_held else guard(mountpoint)):
        lines.append(
            f"{mountpoint} is not guarded: {why}; while nothing is mounted there, files can be "
            "stored on the file system below"
        )
    return lines


def _guard(mountpoint: str) -> str:
    """Guard the directory below a dead mount; return why it cannot be done, or ""."""
    with uncovered(mountpoint) as place:
        if place is None:
            return "it cannot be seen below the mount"
        tree_fd, name = place
        return guard(name, tree_fd)


def _check_directory(mountpoint: str) -> None:
    present = kvfs_at(mountpoint)
    if present is not None:
        raise MountpointUnusable(f"{mountpoint} is already a kvfs mount of {present.source}")
    try:
        mode = os.stat(mountpoint).st_mode
    except FileNotFoundError:
        raise MountpointUnusable(f"mountpoint {mountpoint} does not exist") from None
    except OSError as error:
        raise MountpointUnusable(f"mountpoint {mountpoint}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise MountpointUnusable(f"mountpoint {mountpoint} is not a directory")


def check_tenants(settings: Settings) -> None:
    """Raise UsageError if the settings name tenants that are not there."""
    _, remarks = accounts_of(settings)
    if remarks:
        raise UsageError(remarks[0])


def check_place(settings: Settings) -> None:
    """Raise MountpointUnusable if a mount there would hide what the server or the machine needs.

    A mount over /proc or /dev could not even be ended: the server would wait for itself.
    """
    mountpoint = settings.mountpoint
    needed = [*_NEEDED, *_PROGRAMS, *filter(None, [settings.log_file])]
    for path in needed:
        if _inside(resolve_mountpoint(path), mountpoint):
            raise MountpointUnusable(
                f"mountpoint {mountpoint} cannot be used: a mount would hide {path}, which the "
                "server needs"
            )
    below_it = mount_of(mountpoint)
    if below_it is not None and below_it.fs_type in _THE_KERNELS_OWN:
        raise MountpointUnusable(
            f"mountpoint {mountpoint} lies on a file system of type {below_it.fs_type}, whose "
            "files the kernel makes; use a directory on another one"
        )
    for source in sources_of(settings.source):
        if not is_by_uuid(source):
            _check_apart(source, mountpoint)


def _check_apart(source: str, mountpoint: str) -> None:
    """Raise MountpointUnusable if one lies inside the other: the mount would hide its source."""
    real_source = os.path.realpath(source)
    if real_source == mountpoint:
        raise MountpointUnusable(f"source and mountpoint are the same: {mountpoint}")
    if _inside(real_source, mountpoint):
        raise MountpointUnusable(
            f"source {real_source} lies inside the mountpoint {mountpoint}, which would hide it"
        )
    if _inside(mountpoint, real_source):
        raise MountpointUnusable(f"mountpoint {mountpoint} lies inside the source {real_source}")


def _inside(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory
