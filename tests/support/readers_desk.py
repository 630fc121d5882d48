"""Files over a store on the passthrough path, without a kernel, for tests of readers' handles."""

import dataclasses
import os
from typing import Final

import pytest

from kvfs.core.types import ROOT_INODE, HandleNo, InodeNo
from mount.files.data_path import PassthroughPath
from mount.files.files import Files
from mount.files.handles import Handles
from mount.fuse.grant import Grant
from tests.support.backing_ids import DEVICE_FD, FakeIds
from tests.support.stores import FILE, Host

NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
IDS_MAX: Final = 16


class Desk:
    """Files over a store on the passthrough path, wired as a mount wires them."""

    def __init__(self, machine: Host, patch: pytest.MonkeyPatch, ids_max: int = IDS_MAX) -> None:
        self.host = machine
        self.store = machine.start()
        pool = self.store.pool
        self.ids = FakeIds(patch)
        self.path = PassthroughPath(pool, DEVICE_FD, ids_max)
        pool.ready.adopt, pool.ready.abandon = self.path.adopt, self.path.abandon
        pool.freed = self.path.freed
        self.fd = os.memfd_create("handles")
        self.handles = Handles(self.fd)
        pool.settings = dataclasses.replace(pool.settings, backing_ids_max=ids_max)
        self.files = Files(self.store, self.handles, self.path, io_threads=1)
        self.path.give_up_one = self.files.readers.give_up_one
        self.store.reclaim.unnamed = self.removed
        self.store.blocks.truncating.unnamed = self.removed

    def close(self) -> None:
        """Stop the store; the table's mapping holds a descriptor of its own."""
        self.host.stop()
        del self.handles, self.files, self.path.give_up_one
        os.close(self.fd)

    def removed(self, ino: InodeNo) -> None:
        """An inode lost its name."""
        self.files.readers.forget(ino)
        self.path.forget(ino)

    def put(self, name: bytes, data: bytes = b"bytes") -> InodeNo:
        """Store a block as a connector does, over what is there."""
        draft = b"." + name + b".tmp"
        fh, _, ino, _ = self.files.create(ROOT_INODE, draft, FILE, NEW, 0, 0)
        os.pwrite(self.store.blocks.extent_fd(self.handles.get(fh).opened), data, 0)
        self.files.release(fh)
        replaced = self.store.rename(ROOT_INODE, draft, ROOT_INODE, name, replace=True)
        if replaced is not None:
            self.removed(replaced)
        return ino

    def unlink(self, name: bytes) -> None:
        """Remove a name."""
        self.removed(self.store.namespace.unlink(ROOT_INODE, name))

    def load(self, ino: InodeNo, flags: int = os.O_RDONLY) -> tuple[HandleNo, Grant]:
        """Open and close once; return what the kernel was told."""
        told = self.files.open(ino, flags)
        self.files.release(told[0])
        return told
