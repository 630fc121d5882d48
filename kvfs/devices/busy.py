"""Who uses a block device: told by the kernel's exclusive claim, named for the operator."""

import errno
import os
from collections.abc import Iterator
from typing import Final

from kvfs.errors import SourceBusy, SourceDamaged
from kvfs.mount_table import mounts, where_mounted

_SWAPS: Final = "/proc/swaps"


def claim(path: str, flags: int = os.O_RDONLY) -> int:
    """Open block device *path* exclusively; mounts, swap, RAID and device mapper hold claims too.

    The claim ends with the close. Raises SourceBusy, naming the user where the kernel tells,
    SourceDamaged.
    """
    try:
        return os.open(path, flags | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise SourceBusy(f"{path} is in use: {_user_of(path)}") from None
        raise SourceDamaged(f"{path}: {error.strerror}") from error


def refuse_busy(path: str) -> None:
    """Raise SourceBusy when block device *path* has a user or a holder in /sys/block."""
    os.close(claim(path))
    holders = list(_holders(_sys_path(os.stat(path).st_rdev)))
    if holders:
        raise SourceBusy(f"{path} is in use: held by {', '.join(holders)}")


def _user_of(path: str) -> str:
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
    if where := where_mounted(path):
        return f"the pool on it is mounted {where}"
    return "by another program, or as a pool that is mounted already"


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
