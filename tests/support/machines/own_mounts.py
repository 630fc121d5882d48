"""A mount namespace for each process that runs tests: nobody beside it sees or copies its mounts.

A new mount namespace gets a copy of every mount, and a copy keeps server and source alive.
Containers make some, and so do kvfs for mkfs.xfs and tests that ask for it. Nor are the servers of
others, dead or alive, among the sockets that a command of a test looks at.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.machine.mount_table import FS_TYPE, MNT_DETACH, Mount, mounts
from kvfs.storage.syscalls import LIBC
from mount.fuse.device_number import NUMBERS_LOCK
from tests.support.forks.programs import ROOT

#: linux/sched.h, linux/mount.h.
_CLONE_NEWNS: Final = 0x20000
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 1 << 19
_MS_SHARED: Final = 1 << 20


def enter_own_mounts() -> None:
    """Move the calling thread, and all that it starts, to a mount namespace of its own.

    Mounts and unmounts outside still reach it, and none goes out. Where mounts outside are shared,
    as systemd makes them, those inside are so among themselves. Copies of kvfs mounts and of
    loop devices outside are let go at once: we would keep their servers. Raises OSError.
    """
    shared = any(" shared:" in line for line in _mounts() if line.split()[4] == "/")
    _require(LIBC.unshare(_CLONE_NEWNS))
    _change(_MS_SLAVE)
    if shared:
        _change(_MS_SHARED)
    _give_back_copies()
    _take_own_run_directory()
    _start_guard()


def _start_guard() -> None:
    """Start what ends all that this process leaves in the namespace, however it ends."""
    command = [sys.executable, "-m", "tests.support.machines.namespace_guard", str(os.getpid())]
    guard = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    guard.returncode = 0  # it lives longer than we do, of which Popen would warn


def _give_back_copies() -> None:
    while places := [mount.mountpoint for mount in mounts() if _keeps_others(mount)]:
        for place in places:
            _require(LIBC.umount2(os.fsencode(place), MNT_DETACH))


def _keeps_others(mount: Mount) -> bool:
    return mount.fs_type == FS_TYPE or (mount.fs_type, mount.device[:2]) == ("xfs", "7:")


def _take_own_run_directory() -> None:
    """Cover the directory of the sockets; the lock of device numbers is the machine's."""
    os.makedirs(RUN_DIRECTORY, mode=0o755, exist_ok=True)
    lock_fd = os.open(NUMBERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _mount(b"kvfs-test", RUN_DIRECTORY, b"tmpfs", 0, b"mode=755")
        Path(NUMBERS_LOCK).touch(mode=0o600)
        _mount(b"/proc/thread-self/fd/%d" % lock_fd, NUMBERS_LOCK, None, _MS_BIND, None)
    finally:
        os.close(lock_fd)


def _mounts() -> list[str]:
    return Path("/proc/thread-self/mountinfo").read_text().splitlines()


def _change(propagation: int) -> None:
    _mount(None, "/", None, _MS_REC | propagation, None)


def _mount(
    source: bytes | None, place: str, fs_type: bytes | None, flags: int, data: bytes | None
) -> None:
    word = ctypes.c_ulong(flags)
    _require(LIBC.mount(source, os.fsencode(place), fs_type, word, data))


def _require(result: int) -> None:
    if result != 0:
        error_no = ctypes.get_errno()
        raise OSError(error_no, os.strerror(error_no))
