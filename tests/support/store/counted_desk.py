"""Files over a store, without a kernel, on a data path that tells what it believes open."""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator
from typing import Final

from kvfs.core.types import ROOT_INODE, InodeNo
from mount.files.data_path import DaemonPath
from mount.files.files import Files
from mount.files.handles import Handles
from mount.files.kernel_port import KernelPort
from mount.fuse.wire import Grant
from mount.requests.data import Transfers
from tests.support.devices.power_cuts.power import Drive
from tests.support.kernel.present_request import PresentRequest
from tests.support.store.driven import Opened
from tests.support.store.stores import FILE, Host, host, put

NEW: Final = os.O_RDWR | os.O_CREAT


class CountedPath(DaemonPath):
    """A data path that tells which inodes it believes open, and that may refuse."""

    def __init__(self) -> None:
        self.open: set[InodeNo] = set()
        self.refuse = False

    def grant(self, opened: Opened, *, writer: bool, asks: bool = False) -> Grant:
        """Grant, or fail as an ioctl does."""
        if self.refuse:
            raise OSError(errno.ENOMEM, "no id")
        self.open.add(opened.ino)
        return super().grant(opened, writer=writer, asks=asks)

    def freed(self, opened: Opened) -> None:
        """Note the last one."""
        self.open.discard(opened.ino)


class CountedDesk:
    """Files over a store, with what they keep."""

    def __init__(self, machine: Host | Drive) -> None:
        self.fd = os.memfd_create("handles")
        self.handles = Handles(self.fd)
        settings = dataclasses.replace(machine.settings, data_path="daemon", notifications=False)
        port = KernelPort(
            -1, settings, self.handles, lambda port: machine.start(kernel=port).engine
        )
        self.store = machine.store
        self.path = port.path = CountedPath()
        self.files = Files(port, PresentRequest())
        self.transfers = Transfers(self.files)

    def create(self, name: bytes, flags: int = NEW) -> tuple[int, InodeNo]:
        """Create a file in the root; return handle and inode."""
        fh, _, ino, _ = self.files.create(ROOT_INODE, name, FILE, flags, 0, 0)
        return fh, ino

    def close_file(self, fh: int) -> None:
        """Close a handle as a living process does."""
        self.files.flush(fh, os.getpid())
        self.files.release(fh)

    def identified(self, name: bytes) -> InodeNo:
        """Store a block that the device knows to be whole; return its inode."""
        ino = put(self.store, ROOT_INODE, name, b"bytes")
        self.store.sync()
        return ino

    def assert_nothing_is_open(self) -> None:
        """Assert that store, table and data path agree."""
        assert len(self.handles) == len(self.store.open_inos) == len(self.path.open) == 0


@contextlib.contextmanager
def counted_desk() -> Iterator[CountedDesk]:
    """Yield files over a fresh pool in memory."""
    with host() as machine:
        made = CountedDesk(machine)
        try:
            yield made
        finally:
            made.handles._memory.close()  # it holds a descriptor of its own
            os.close(made.fd)
            machine.stop()
