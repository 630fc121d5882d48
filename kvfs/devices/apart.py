"""Programs that look at every mountpoint of the machine, run where no FUSE server can hold them up.

mkfs.xfs and xfs_logprint ask by stat(2) what is mounted where (platform_check_mount of xfsprogs),
and wait for as long as the server of any FUSE mount hangs.
"""

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final

from kvfs.machine.mount_table import mounts
from kvfs.storage.syscalls import LIBC

#: linux/sched.h, linux/mount.h; umount(2).
_CLONE_NEWNS: Final = 0x20000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
_MNT_DETACH: Final = 2
_REASON_MAX_BYTES: Final = 256

_log: Final = logging.getLogger(__name__)


@contextlib.contextmanager
def without_fuse(program: str) -> Iterator[Callable[[], None] | None]:
    """Yield what a child does before it becomes *program*: it goes where no FUSE is mounted.

    None where nothing is to be done. In the child's own mount namespace, which gets what is
    unmounted outside and tells nothing of what is unmounted in it. Where it may not have one (a
    unit's RestrictNamespaces=, no CAP_SYS_ADMIN) the program runs all the same, and the log says
    so: start it inside.
    """
    mountpoints = {mount.mountpoint for mount in mounts() if _is_fuse(mount.fs_type)}
    # Not what the program itself lies on.
    apart = [path for path in mountpoints if not f"{program}/".startswith(f"{path.rstrip('/')}/")]
    if not apart:
        yield None
        return
    # The outermost first: what is mounted in it goes along, and is not walked to.
    paths = [os.fsencode(path) for path in sorted(apart, key=len)]
    flags = ctypes.c_ulong(_MS_REC | _MS_SLAVE)
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def leave() -> None:
        if LIBC.unshare(_CLONE_NEWNS) != 0 or LIBC.mount(None, b"/", None, flags, None) != 0:
            os.write(writing, os.strerror(ctypes.get_errno()).encode())
            return
        for path in paths:
            LIBC.umount2(path, _MNT_DETACH)

    try:
        yield leave
    finally:
        with contextlib.suppress(BlockingIOError):  # it says nothing where all went well
            refusal = os.read(reading, _REASON_MAX_BYTES).decode()
            _log.warning(
                "%s gets no mount namespace of its own (%s): it looks at every mount of this "
                "machine, and hangs where a FUSE server does",
                program,
                refusal,
            )
        os.close(reading)
        os.close(writing)


def _is_fuse(fs_type: str) -> bool:
    return fs_type in ("fuse", "fuseblk") or fs_type.startswith(("fuse.", "fuseblk."))
