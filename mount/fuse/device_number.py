"""The device number of the mount (st_dev): the same as the last time, if it is free.

A file system without a block device gets the lowest number that is free on the machine
(get_anon_bdev in fs/super.c). NFS-Ganesha puts this number into its clients' handles, because FUSE
leaves f_fsid 0 (measured with 4.3). To get a certain number, all free ones below it are first taken
for a moment, by file systems that are mounted nowhere.

The file DEVICE of the pool holds the minor number in decimal. It is a hint: if it is missing or
does not parse, no number is asked for.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.core.pool_layout import DEVICE, DEVICE_NEW
from kvfs.devices.detached import mount_detached
from kvfs.storage.replaced_file import replaced_file
from kvfs.storage.syscalls import Syscalls

_log: Final = logging.getLogger(__name__)

#: include/linux/kdev_t.h, MINORBITS.
_MINOR_MAX: Final = (1 << 20) - 1
_FILE_BYTES: Final = 16

#: A file system that is empty, in memory, and part of every kernel (fs/ramfs).
_FILLER: Final = "ramfs"
#: Each filler takes a descriptor and about 0.3 ms.
_FILLERS_MAX: Final = 1024
_FILLING_MAX_S: Final = 1.0
#: Keeps servers that start together from taking each other's numbers. The wait for it is short: its
#: holder may hang in mount(2).
NUMBERS_LOCK: Final = f"{RUN_DIRECTORY}/device-number.lock"
_LOCK_WAIT_S: Final = 2.0
_LOCK_LOOK_S: Final = 0.01


class DeviceNumber(NamedTuple):
    """The minor number of this mount, and that of the mount before."""

    present: int | None
    """None if the mount table did not tell. The major number is always 0."""
    before: int | None
    """None if it is the same, or not known."""


@contextlib.contextmanager
def at_number(wanted: int | None) -> Iterator[None]:
    """Give the mount made inside the ``with`` the minor number *wanted*, if that is free.

    Takes 3 s at most and never fails: the mount may just get another number, also if another
    program mounts or unmounts meanwhile. The mount table tells which it got.
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
    """Put file systems with all free numbers below *wanted* into *fillers*. Raises OSError.

    Returns False if *wanted* is not free, or if there are too many numbers to take.
    """
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
    """Hold the lock of all servers that ask for a number; after a while go on without it."""
    try:
        os.makedirs(RUN_DIRECTORY, mode=0o755, exist_ok=True)
        fd = os.open(NUMBERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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


def remembered(pool_fds: Iterable[int]) -> int | None:
    """Return the minor number of the pool's last mount; None if it is not known.

    *pool_fds* are the directories of its drives: the one that was written last counts.
    """
    found = (_remembered_on(pool_fd) for pool_fd in pool_fds)
    return max((one for one in found if one is not None), default=(0, None))[1]


def _remembered_on(pool_fd: int) -> tuple[int, int] | None:
    """Return when DEVICE was written on one drive, in ns, and what it says; None if nothing."""
    try:
        fd = os.open(DEVICE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=pool_fd)
    except OSError:
        return None
    try:
        minor, written_ns = int(os.read(fd, _FILE_BYTES)), os.fstat(fd).st_mtime_ns
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return (written_ns, minor) if 0 < minor <= _MINOR_MAX else None


def remember(
    pool_fds: Collection[int], present: int | None, before: int | None, *, read_only: bool
) -> DeviceNumber:
    """Save on all drives that the mount has the minor number *present*; log if it was another."""
    if present is None:
        return DeviceNumber(present, None)
    for pool_fd in () if read_only else pool_fds:
        _remember_on(pool_fd, present)
    if present == before:
        return DeviceNumber(present, None)
    if before is not None:
        _log.info(
            "device number 0:%d, not 0:%d as before: clients of NFS-Ganesha must mount again",
            present,
            before,
        )
    return DeviceNumber(present, before)


def _remember_on(pool_fd: int, present: int) -> None:
    """Have DEVICE on one drive say *present*; nothing is written if it does."""
    found = _remembered_on(pool_fd)
    if found is not None and found[1] == present:
        return
    try:
        with replaced_file(pool_fd, Syscalls(), DEVICE, DEVICE_NEW, durable=True) as fd:
            os.write(fd, b"%d\n" % present)
    except OSError as error:
        _log.warning("DEVICE cannot be written: %s", error.strerror)
