"""Whether a block device is in use, by the kernel's exclusive claim, and by whom, for messages.

An XFS may have outlived its server: clients of the dead mount still have files on it open. It is
not mounted on any path. A second mount of its device joins it (get_tree_bdev in fs/super.c), with
its page cache and its log. The pool's lock decides which of two servers may have the pool.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from kvfs.core.errors import SourceBusy, SourceDamaged
from kvfs.devices import loop
from kvfs.machine.mount_table import mounts, where_in_use
from kvfs.machine.process_ends import has_exited

_SWAPS: Final = "/proc/swaps"
_UNKNOWN_USER: Final = (
    "by another program, by a pool that is already mounted, or by clients of a dead mount"
)


def claim(path: str, flags: int = os.O_RDONLY) -> int:
    """Return an exclusively opened fd of block device *path*; its close ends the claim.

    Mounts, swap, RAID and device mapper hold claims, too. Raises SourceDamaged, or SourceBusy,
    which names the user if it can be found.
    """
    try:
        return os.open(path, flags | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            user = _known_user(path) or _pool_user(path) or _UNKNOWN_USER
            raise SourceBusy(f"{path} is in use: {user}") from None
        raise SourceDamaged(f"{path}: {error.strerror}") from error


def refuse_busy(path: str) -> None:
    """Raise SourceBusy when block device *path* has a user or a holder in /sys/block.

    If it is a loop device, another one on the same file counts as a user: the pool may be mounted
    through it.
    """
    os.close(claim(path))
    if loop.is_loop(path) and (others := list(loop.others_of(path))):
        raise SourceBusy(f"{path} is in use: its file is attached to {', '.join(others)} as well")
    holders = holders_of(path)
    if holders:
        raise SourceBusy(f"{path} is in use: held by {', '.join(holders)}")


def holders_of(path: str) -> list[str]:
    """Return what the kernel calls the block devices that lie on block device *path*."""
    return list(_holders(_sys_path(os.stat(path).st_rdev)))


def has_unknown_user(path: str) -> bool:
    """Whether block device *path* is claimed, but no user can be found. Raises SourceDamaged.

    That is so for a server: its file system is mounted on no path, and may have outlived it.
    """
    try:
        os.close(claim(path))
    except SourceBusy:
        return not _known_user(path)
    return False


def kernel_name(path: str) -> str:
    """Return the name of block device *path* in the kernel, as in /sys/block."""
    return os.path.basename(os.path.realpath(_sys_path(os.stat(path).st_rdev)))


def _known_user(path: str) -> str:
    device_no = os.stat(path).st_rdev
    sys_path = _sys_path(device_no)
    numbers = {f"{os.major(device_no)}:{os.minor(device_no)}", *_partitions(sys_path)}
    for mount in mounts():
        if mount.device in numbers:
            return f"mounted on {mount.mountpoint}"
    holders = list(_holders(sys_path))
    if holders:
        return f"held by {', '.join(holders)}"
    with open(_SWAPS, encoding="utf-8", errors="backslashreplace") as swaps:
        for line in swaps.readlines()[1:]:
            try:
                number = os.stat(line.split()[0]).st_rdev
            except OSError:
                continue
            if f"{os.major(number)}:{os.minor(number)}" in numbers:
                return "swap space"
    return ""


def _pool_user(path: str) -> str:
    """Say where the pool is mounted. For messages only: a dead server's pool can be joined."""
    where = where_in_use(path)
    return f"the pool on it is mounted {where}" if where else ""


def _sys_path(device_no: int) -> str:
    return f"/sys/dev/block/{os.major(device_no)}:{os.minor(device_no)}"


def _partitions(sys_path: str) -> Iterator[str]:
    for name in _listdir(sys_path):
        try:
            with open(f"{sys_path}/{name}/dev", encoding="ascii") as file:
                yield file.read().strip()
        except OSError:
            continue


def _holders(sys_path: str) -> Iterator[str]:
    yield from _listdir(f"{sys_path}/holders")
    for name in _listdir(sys_path):
        yield from _listdir(f"{sys_path}/{name}/holders")


def _listdir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def lock_holders(status: os.stat_result) -> set[int]:
    """Return the ids of the processes that hold a lock on the file with *status*.

    A dead process is included if something keeps its open file (a loop device); processes of other
    pid namespaces are not. Read from proc_locks(5), because trying the lock could make others fail
    that try it at the same time. Raises OSError.
    """
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with open("/proc/locks", encoding="ascii") as file:
        lines = [line.split() for line in file]
    # "1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF"; a waiter's line has "->" before FLOCK.
    return {int(fields[4]) for fields in lines if len(fields) > 5 and fields[5] == wanted}


def is_alive(pid: int) -> bool:
    """Whether process *pid* is alive; one that has ended but was not reaped is not."""
    return os.path.exists(f"/proc/{pid}") and not has_exited(pid)


#: Each mounted XFS has this file, by its device's name; Documentation/ABI/testing/sysfs-fs-xfs.
_XFS_IN_SYSFS: Final = "/sys/fs/xfs/{}/log/log_head_lsn"


class Outlived:
    """A file system that outlived its server; can tell whether it is still mounted."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def is_gone(self) -> bool:
        """Whether it was unmounted since; its file in sysfs ends then. Raises OSError."""
        try:
            return not os.pread(self._fd, 1, 0)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return True


@contextlib.contextmanager
def outlived(block_path: str) -> Iterator[Outlived | None]:
    """Yield the XFS on *block_path* if it is mounted by no user that can be found; else None."""
    fd = -1
    if has_unknown_user(block_path):
        with contextlib.suppress(FileNotFoundError):  # not claimed by an XFS, or no sysfs
            fd = os.open(_XFS_IN_SYSFS.format(kernel_name(block_path)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield Outlived(fd) if fd >= 0 else None
    finally:
        if fd >= 0:
            os.close(fd)
