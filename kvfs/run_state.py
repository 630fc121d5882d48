"""RUN: whether the pool was stopped cleanly, and in which boot it ran last.

The index is never fsynced on the way, so it is to be believed only after a clean stop, or when
the same boot's page cache still stands behind it.
"""

import contextlib
import json
import os
from typing import Final, NamedTuple

from kvfs.syscalls import Syscalls

_NAME: Final = "RUN"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_SIZE_MAX_BYTES: Final = 4096


class RunState(NamedTuple):
    """The last word a server left in the pool; a pool that never ran is clean.

    ``strays``: stopped cleanly, but files may lie there that no inode knows, or identities that
    are out of date, because the device failed or a sweep was not done.
    """

    boot_id: str
    clean: bool
    strays: bool = False

    @property
    def trusted(self) -> bool:
        """Whether the index is what was last committed to it."""
        return self.clean or self.boot_id == present_boot_id()


def present_boot_id() -> str:
    """Return the kernel's id of this boot (proc_sys_kernel(5))."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


def read_run_state(pool_fd: int, syscalls: Syscalls) -> RunState:
    """Return what RUN says; an unreadable file says "not clean, of no known boot"."""
    try:
        fd = syscalls.open(_NAME, os.O_RDONLY | os.O_CLOEXEC, dir_fd=pool_fd)
    except FileNotFoundError:
        return RunState("", clean=True)
    try:
        state = json.loads(syscalls.read(fd, _SIZE_MAX_BYTES))
        return RunState(
            str(state["boot_id"]), clean=state["clean"] is True, strays=state.get("strays") is True
        )
    except (ValueError, KeyError, TypeError):
        return RunState("", clean=False)
    finally:
        syscalls.close(fd)


def write_run_state(pool_fd: int, syscalls: Syscalls, *, clean: bool, strays: bool = False) -> None:
    """Replace RUN and make it durable. Raises OSError."""
    state = {"boot_id": present_boot_id(), "clean": clean, "strays": strays, "pid": os.getpid()}
    text = json.dumps(state)
    temporary = _NAME + ".new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = syscalls.open(temporary, flags, 0o600, dir_fd=pool_fd)
    try:
        syscalls.write(fd, text.encode())
        syscalls.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            syscalls.unlink(temporary, dir_fd=pool_fd)
        raise
    finally:
        syscalls.close(fd)
    syscalls.rename(temporary, _NAME, src_dir_fd=pool_fd, dst_dir_fd=pool_fd)
    syscalls.fsync(pool_fd)


def distrust_index(pool_fd: int, syscalls: Syscalls) -> None:
    """Make sure that the next start does not believe the index, unless it was stopped cleanly.

    Empties RUN in place: that needs no room on the device, and no half of it says otherwise. For
    a page cache that is no witness any more: a sync failed, or the file system was cut off.
    Raises OSError.
    """
    if read_run_state(pool_fd, syscalls).clean:
        return
    fd = syscalls.open(_NAME, os.O_WRONLY | os.O_CLOEXEC, dir_fd=pool_fd)
    try:
        syscalls.ftruncate(fd, 0)
        syscalls.fsync(fd)
    finally:
        syscalls.close(fd)
