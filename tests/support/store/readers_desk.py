"""Files over a store on the passthrough path, without a kernel, for tests of readers' handles."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.types import ROOT_INODE, HandleNo, InodeNo
from mount.files import kernel_port
from mount.files.data_path import PathChoice
from mount.files.files import Files
from mount.files.handles import Handles
from mount.files.kernel_port import KernelPort
from mount.fuse.channel import Answer, Requester
from mount.fuse.wire import Grant
from mount.requests.answers import Answers, Generations
from mount.requests.fast import FastAnswers
from tests.support.kernel.backing_ids import DEVICE_FD, FakeIds
from tests.support.kernel.present_request import PresentRequest
from tests.support.store.stores import FILE, Host

NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
IDS_MAX: Final = 16
#: kthreadd: nfsd is such a one, too.
KERNEL_THREAD: Final = 2


class Desk:
    """Files over a store on the passthrough path, wired as a mount wires them."""

    def __init__(self, machine: Host, patch: pytest.MonkeyPatch, ids_max: int = IDS_MAX) -> None:
        self.host = machine
        self.ids = FakeIds(patch)
        self.fd = os.memfd_create("handles")
        self.handles = Handles(self.fd)
        settings = dataclasses.replace(
            machine.settings, backing_ids_max=ids_max, notifications=False
        )
        patch.setattr(kernel_port, "choose_path", lambda _: PathChoice(True, "ids are faked"))
        self.port = KernelPort(
            DEVICE_FD,
            settings,
            self.handles,
            lambda port: machine.start(settings=settings, kernel=port).engine,
        )
        self.port.writers_run_free = False  # who writes here asks
        self.store, self.path, self.removed = machine.store, self.port.path, self.port.unnamed
        self.request = PresentRequest()
        self.files = Files(self.port, self.request)

    def close(self) -> None:
        """Stop the store, and close the table, whose mapping holds a descriptor of its own."""
        self.host.stop()
        self.handles._memory.close()
        os.close(self.fd)

    def in_channel(self) -> dict[int, Answer]:
        """Return what the channel answers with, by opcode."""
        engine, settings = self.store.engine, self.host.settings
        answers = Answers(engine, self.files, settings, Generations(0), self.removed)
        return FastAnswers(answers, self.files).answers()

    def put(self, name: bytes, data: bytes = b"bytes") -> InodeNo:
        """Store a block as a connector does, over what is there."""
        draft = b"." + name + b".tmp"
        fh, _, ino, _ = self.files.create(ROOT_INODE, draft, FILE, NEW, 0, 0)
        os.pwrite(self.store.extent_fd(self.handles.get(fh).opened), data, 0)
        self.files.release(fh)
        replaced = self.store.rename(ROOT_INODE, draft, ROOT_INODE, name, replace=True)
        if replaced is not None:
            self.removed(replaced)
        return ino

    def unlink(self, name: bytes) -> None:
        """Remove a name."""
        unnamed = self.store.unlink(ROOT_INODE, name)
        assert unnamed is not None
        self.removed(unnamed)

    @contextlib.contextmanager
    def by_server(self) -> Iterator[None]:
        """Let the requests meanwhile be those of a file server, which kernel threads count as."""
        self.request.present = Requester(0, 0, KERNEL_THREAD)
        try:
            yield
        finally:
            self.request.present = PresentRequest.present

    def load(self, ino: InodeNo, flags: int = os.O_RDONLY) -> tuple[HandleNo, Grant]:
        """Open and close once; return what the kernel was told."""
        told = self.files.open(ino, flags)
        self.files.release(told[0])
        return told
