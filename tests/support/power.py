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
from typing import Final

from kvfs.core.settings import Settings
from kvfs.devices import Device, format_source, open_source, wait_released
from kvfs.engine.store import Store
from kvfs.pool.ports import Kernel
from tests.support.kernel_recorder import KernelRecorder
from tests.support.mounting import workplace
from tests.support.stores import MIB, fill_pool, kill

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

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = Settings(index_preallocate_bytes=MIB, index_map_bytes=64 * MIB)
        format_source(str(path), size_bytes=400 * MIB, fill=fill_pool)
        self._device: Device | None = None
        self.store: Store | None = None

    def read_only(self) -> Settings:
        """Return the settings of a mount that writes nothing."""
        return dataclasses.replace(self.settings, read_only=True)

    def start(self, kernel: Kernel | None = None) -> Store:
        """Start a store."""
        self._device = open_source(str(self.path), read_only=self.settings.read_only)
        try:
            self.store = Store(self._device, self.settings, kernel or KernelRecorder())
        except BaseException:
            self._device.close()
            self._device = None
            raise
        return self.store

    def cut(self, cut: Cut) -> None:
        """Take the power away.

        The server's mappings end first: a dirty page that XFS discards would be a SIGBUS for LMDB.
        """
        assert self._device is not None
        if self.store is not None:
            kill(self.store)
            self.store = None
        shut_down(self._device.pool_fd, cut)
        self.kill()

    def kill(self) -> None:
        """End the store as SIGKILL does."""
        if self.store is not None:
            kill(self.store)
            self.store = None
        if self._device is not None:
            self._device.close()
            self._device = None
            wait_released(str(self.path))

    def stop(self) -> None:
        """Stop cleanly."""
        assert self.store is not None
        store, self.store = self.store, None
        store.close()
        self.kill()


@contextlib.contextmanager
def drive() -> Iterator[Drive]:
    """Yield a drive with a new pool, not started."""
    with workplace() as place:
        made = Drive(place / "image")
        try:
            yield made
        finally:
            made.kill()


def write_back(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Write a part of a file to the device, and only that: no size, no log."""
    if _libc.sync_file_range(fd, offset_bytes, length_bytes, _WRITE_AND_WAIT) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
