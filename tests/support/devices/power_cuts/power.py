"""A pool on a real XFS that loses power: its log and its page cache end where they are."""

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvfs.core.settings import Settings
from kvfs.devices import Device, format_source, open_source, wait_released
from kvfs.engine.recovery.fsck import check_pool
from kvfs.pool.open.ports import Kernel
from kvfs.storage.syscalls import Syscalls
from tests.support.mounts.mounting import workplace
from tests.support.store.driven import Driven, driven
from tests.support.store.stores import MIB, fill_pool, no_bar

if TYPE_CHECKING:
    from tests.support.store.outliving_memory import OutlivingMemory

#: _IOR('X', 125, __u32), linux fs/xfs/libxfs/xfs_fs.h.
_XFS_IOC_GOINGDOWN: Final = 0x8004587D
#: sync_file_range(2): wait before, write, wait after.
_WRITE_AND_WAIT: Final = 7
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class Cut(IntEnum):
    """What still reaches the device: neither log nor data, or the log but no more data."""

    NOTHING = 2
    LOG_ONLY = 1


def shut_down(directory_fd: int, cut: Cut) -> None:
    """Shut the XFS that *directory_fd* lies on down by force: calls on it fail from now on."""
    fcntl.ioctl(directory_fd, _XFS_IOC_GOINGDOWN, struct.pack("I", cut))


class Drive:
    """An image file with a pool, and the store on it."""

    def __init__(self, path: Path, *, blank: bool = True, memory: Path | None = None) -> None:
        """*blank*: the image is made, with a pool; else it is one that has been used.

        *memory* is where the index is while the pool is served; beside the image by default.
        """
        self.path = path
        memory = memory or path.with_name("index memory")
        memory.mkdir(exist_ok=True)
        self.settings = Settings(
            index_preallocate_bytes=MIB, index_map_bytes=64 * MIB, index_memory_dir=str(memory)
        )
        if blank:
            format_source(str(path), size_bytes=400 * MIB, fill=fill_pool)
        self._device: Device | None = None
        self._store: Driven | None = None
        self.memory: OutlivingMemory | None = None
        """What the supervisor holds, if stores take over from each other."""

    @property
    def store(self) -> Driven:
        """The running store."""
        assert self._store is not None
        return self._store

    def read_only(self) -> Settings:
        """Return the settings of a mount that writes nothing."""
        return dataclasses.replace(self.settings, read_only=True)

    def start(self, kernel: Kernel | None = None, syscalls: Syscalls | None = None) -> Driven:
        """Start a store."""
        self._device = open_source(str(self.path), read_only=self.settings.read_only)
        try:
            memory = None if self.memory is None else self.memory.at(self.settings)
            self._store = driven(
                self._device, self.settings, kernel, syscalls=syscalls, outliving=memory
            )
        except BaseException:
            self._device.close()
            self._device = None
            raise
        return self._store

    def take_over(self) -> Driven:
        """Kill the store, and start another that goes on, on the same mounted file system."""
        assert self._device is not None
        assert self.memory is not None
        self.store.kill()
        memory = self.memory.at(self.settings)
        self._store = driven(self._device, self.settings, outliving=memory, living=())
        return self._store

    def cut(self, cut: Cut) -> None:
        """Take the power away.

        The server's mappings end first: a dirty page that XFS discards would be a SIGBUS for LMDB.
        """
        assert self._device is not None
        if self._store is not None:
            self._store.kill()
            self._store = None
        shut_down(self._device.pool_fd, cut)
        self.kill()

    def kill(self) -> None:
        """End the store as SIGKILL does."""
        if self._store is not None:
            self._store.kill()
            self._store = None
        if self._device is not None:
            self._device.close()
            self._device = None
            wait_released(str(self.path))

    def stop(self) -> None:
        """Stop cleanly."""
        store, self._store = self.store, None
        store.stop()
        self.kill()

    def problems(self) -> list[str]:
        """Return what fsck finds on the stopped pool."""
        with open_source(str(self.path), read_only=True) as device:
            return check_pool(device, repair=False, progress=no_bar).problems

    def repair(self) -> None:
        """Repair the pool, which is not running, as ``kvfs fsck --repair`` does."""
        with open_source(str(self.path)) as device:
            check_pool(device, repair=True, progress=no_bar)


@contextlib.contextmanager
def drive() -> Iterator[Drive]:
    """Yield a drive with a new pool, not started."""
    with workplace() as place:
        made = Drive(place / "image")
        try:
            yield made
        finally:
            made.kill()
            if made.memory is not None:
                made.memory.close()


def write_back(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Write a part of a file to the device, and only that: no size, no log."""
    if _libc.sync_file_range(fd, offset_bytes, length_bytes, _WRITE_AND_WAIT) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_whole(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write *data*, in parts if the rest of it waits. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)  # O_APPEND: behind what is there
