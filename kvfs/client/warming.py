"""Reading files so that the kernel has their bytes in memory: bounded in rate and in bytes.

All reads use one buffer; what stays is the kernel's page cache. Names may come from anywhere, so
whatever is not a regular file of a kvfs mount is never opened.
"""

import errno
import os
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

from kvfs.machine.mount_table import FS_TYPE, mounts

_READ_BYTES: Final = 1 << 20
#: Longest burst above the rate.
_BURST_S: Final = 0.1


class Warming:
    """Reads files until *limit_bytes* are read, at *rate_bytes* a second or less."""

    def __init__(self, devices: Collection[int], limit_bytes: int, rate_bytes: int) -> None:
        """*devices*: st_dev of the file systems whose files are read."""
        self._devices = devices
        self._limit_bytes = limit_bytes
        self._rate_bytes = rate_bytes
        self._buffer = memoryview(bytearray(_READ_BYTES))
        #: When the first read began, moved later by time that was not used.
        self._begun_s: float | None = None
        self.blocks = 0
        self.bytes = 0
        #: Files that were not read, by reason.
        self.left: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.bytes >= self._limit_bytes

    def read(self, path: str) -> None:
        """Read the file at *path*, or count why not."""
        try:
            found = os.stat(path, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                self.left["not a file"] += 1
            elif found.st_dev not in self._devices:
                self.left["not on this mount"] += 1
            else:
                self._read(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
                self.blocks += 1
        except OSError as error:
            self.left[_reason(error)] += 1

    def _read(self, fd: int) -> None:
        try:
            at = 0
            while not self.is_full and (count := os.preadv(fd, [self._buffer], at)):
                at += count
                self.bytes += count
                self._wait()
        finally:
            os.close(fd)

    def _wait(self) -> None:
        """Sleep while more was read than the rate allows; unused time is worth a burst at most."""
        if self._begun_s is None:
            self._begun_s = time.monotonic()
        due_s = self._begun_s + self.bytes / self._rate_bytes
        ahead_s = due_s - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
        elif ahead_s < -_BURST_S:
            self._begun_s -= ahead_s + _BURST_S


def files_of(path: str) -> Iterator[str]:
    """Yield *path*, or each file below it if it is a directory; links are not followed."""
    waiting = [path]
    while waiting:
        at = waiting.pop()
        try:
            if not stat.S_ISDIR(os.stat(at, follow_symlinks=False).st_mode):
                yield at
                continue
            with os.scandir(at) as children:
                for child in children:
                    if child.is_dir(follow_symlinks=False):
                        waiting.append(child.path)
                    else:
                        yield child.path
        except OSError:
            yield at  # reading it tells why


def kvfs_devices() -> set[int]:
    """Return st_dev of every kvfs mount, without asking their servers."""
    found = set[int]()
    for mount in mounts():
        if mount.fs_type == FS_TYPE:
            major, _, minor = mount.device.partition(":")
            found.add(os.makedev(int(major), int(minor)))
    return found


def memory_available_bytes() -> int:
    """Return what the kernel can give without swapping (MemAvailable); 0 if it does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        return 0
    return 0


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
        return "gone"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "no permission"
    return error.strerror or str(error)
