"""Programs that look at every mountpoint of the machine, run where no FUSE server can hold them up.

mkfs.xfs and xfs_logprint ask by stat(2) what is mounted where (platform_check_mount of xfsprogs),
and wait for as long as the server of any FUSE mount hangs.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Final

from kvfs.mount_table import mounts

#: linux/sched.h, linux/mount.h; umount(2).
_CLONE_NEWNS: Final = 0x20000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
_MNT_DETACH: Final = 2

_libc: Final = ctypes.CDLL(None, use_errno=True)


def without_fuse(program: str) -> Callable[[], None] | None:
    """Return what a child does before it becomes *program*: it goes where no FUSE is mounted.

    None where nothing is to be done. In the child's own mount namespace, which gets what is
    unmounted outside and tells nothing of what is unmounted in it.
    """
    mountpoints = {mount.mountpoint for mount in mounts() if _is_fuse(mount.fs_type)}
    # Not what the program itself lies on.
    apart = [path for path in mountpoints if not f"{program}/".startswith(f"{path.rstrip('/')}/")]
    if not apart:
        return None
    # The outermost first: what is mounted in it goes along, and is not walked to.
    paths = [os.fsencode(path) for path in sorted(apart, key=len)]
    flags = ctypes.c_ulong(_MS_REC | _MS_SLAVE)

    def leave() -> None:
        if _libc.unshare(_CLONE_NEWNS) != 0 or _libc.mount(None, b"/", None, flags, None) != 0:
            return
        for path in paths:
            _libc.umount2(path, _MNT_DETACH)

    return leave


def _is_fuse(fs_type: str) -> bool:
    return fs_type in ("fuse", "fuseblk") or fs_type.startswith(("fuse.", "fuseblk."))
