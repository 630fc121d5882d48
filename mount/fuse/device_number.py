"""The device number of the mount (st_dev): the same as the last time, if it is free.

A file system without a drive gets the lowest number that is free on the machine (get_anon_bdev in
fs/super.c). A file server that finds no f_fsid, which FUSE leaves 0, knows the mount by it:
NFS-Ganesha puts it into its clients' handles (measured with 4.3). So the free numbers below the one
that is wanted are taken for a moment by file systems that are mounted nowhere.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.devices.detached import mount_detached
from kvfs.storage.device_number import read_device_number, write_device_number
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: Empty, in memory, and in every kernel (fs/ramfs).
_FILLER: Final = "ramfs"
#: Each takes a descriptor and about 0.3 ms.
_FILLERS_MAX: Final = 1024
_FILLING_MAX_S: Final = 1.0
#: Servers that start at once would take each other's numbers. Who holds it may hang in mount(2).
_LOCK: Final = f"{RUN_DIRECTORY}/device-number.lock"
_LOCK_WAIT_S: Final = 2.0
_LOCK_LOOK_S: Final = 0.01


class DeviceNumber(NamedTuple):
    """What the mount has, and what it had the last time."""

    present: int | None
    """The minor number; the major one is 0. None: the mount table did not tell."""
    before: int | None
    """None: the same, or not known."""


@contextlib.contextmanager
def at_number(wanted: int | None) -> Iterator[None]:
    """Let what the body mounts have the minor number *wanted* if it is free; else it gets any.

    Takes 3 s at most, and never fails because of the number. Another program may mount or unmount
    meanwhile: the mount table tells which number it became.
    """
    with contextlib.ExitStack() as stack:
        if wanted is not None:
            stack.enter_context(_alone())
            fillers: list[int] = []
            stack.callback(_close, fillers)
            with contextlib.suppress(OSError):  # not privileged, or no descriptor is left
                if not _fill(wanted, fillers):
                    _close(fillers)
        yield


def _fill(wanted: int, fillers: list[int]) -> bool:
    """Take all free numbers below *wanted*; False if it is not free, or too many are. OSError."""
    until_s = time.monotonic() + _FILLING_MAX_S
    while len(fillers) < _FILLERS_MAX and time.monotonic() < until_s:
        fillers.append(fd := mount_detached(_FILLER, "kvfs", {}, (), 0))
        number = os.minor(os.fstat(fd).st_dev)
        if number >= wanted:
            os.close(fillers.pop())
            return number == wanted
    return False


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of the servers that want a number; after a while go on without it."""
    try:
        os.makedirs(RUN_DIRECTORY, mode=0o755, exist_ok=True)
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        until_s = time.monotonic() + _LOCK_WAIT_S
        while not _is_locked(fd) and time.monotonic() < until_s:
            time.sleep(_LOCK_LOOK_S)
        yield
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    """Try to lock *fd*."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _close(fillers: list[int]) -> None:
    while fillers:
        os.close(fillers.pop())


def remembered(pool_fd: int) -> int | None:
    """Return the minor number that the pool's mount had last; None: not known."""
    return read_device_number(pool_fd, Syscalls())


def remember(
    pool_fd: int, present: int | None, before: int | None, *, read_only: bool
) -> DeviceNumber:
    """Note in the pool that its mount has the minor number *present*, and say if that is new."""
    if present is None or present == before:
        return DeviceNumber(present, None)
    if before is not None:
        _log.info(
            "device number 0:%d, not 0:%d as before: clients of NFS-Ganesha must mount again",
            present,
            before,
        )
    if not read_only:
        try:
            write_device_number(pool_fd, Syscalls(), present)
        except OSError as error:
            _log.warning("DEVICE cannot be written: %s", error.strerror)
    return DeviceNumber(present, before)
