"""What must hold before a mount touches anything; each failure is one line that names it."""

import os
import stat

from kvfs.cli.servers import answer_of, is_dead
from kvfs.errors import MountpointUnusable
from kvfs.mount_table import kvfs_at


def check_mountpoint(mountpoint: str) -> None:
    """Raise MountpointUnusable unless the resolved path *mountpoint* can take a mount."""
    present = kvfs_at(mountpoint)
    if present is not None:
        dead = f"; its server is dead: `kvfs umount {mountpoint}` clears it"
        raise MountpointUnusable(
            f"{mountpoint} is a kvfs mount of {present.source} already"
            f"{dead if is_dead(mountpoint, answer_of(mountpoint)) else ''}"
        )
    try:
        mode = os.stat(mountpoint).st_mode
    except FileNotFoundError:
        raise MountpointUnusable(f"mountpoint {mountpoint} does not exist") from None
    except OSError as error:
        raise MountpointUnusable(f"mountpoint {mountpoint}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise MountpointUnusable(f"mountpoint {mountpoint} is not a directory")


def check_apart(source: str, mountpoint: str) -> None:
    """Raise MountpointUnusable when one lies inside the other: the mount would hide its source."""
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
