"""A directory on a file system that was mounted anew since: no page cache vouches for its index."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.types import ROOT_INODE
from kvfs.devices.directory import superblock_of
from tests.support.clients.stepping import until
from tests.support.devices.power_cuts.power import Cut, shut_down
from tests.support.mounts.mounting import loop_device, workplace
from tests.support.store.stores import MIB, Host, put, settle, tree

pytestmark = [pytest.mark.needs_loop, pytest.mark.usefixtures("caplog")]

SIZE_BYTES = 400 * MIB


class Parent:
    """A native file system at ``path`` that can be cut off and mounted again."""

    def __init__(self, device: str, path: Path) -> None:
        self.path = path
        self._device = device
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", self._device, self.path], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self.path], check=True)

    def cut_off(self) -> None:
        """Shut it down by force, with what is in its log, and mount it again.

        A mount namespace that another test made meanwhile has a copy of the mount. While it lasts,
        a new mount is of the file system that was shut down.
        """
        fd = os.open(self.path, os.O_RDONLY)
        try:
            shut_down(fd, Cut.LOG_ONLY)
        finally:
            os.close(fd)
        until(self._is_mounted_anew, "nobody else has it mounted")

    def _is_mounted_anew(self) -> bool:
        self.unmount()
        self.mount()
        try:
            os.listdir(self.path)
        except OSError:
            return False
        return True


@pytest.fixture
def parent() -> Iterator[Parent]:
    with workplace("disk") as place, loop_device(SIZE_BYTES, format_xfs=True) as device:
        (place / "xfs").mkdir()
        made = Parent(device, place / "xfs")
        try:
            yield made
        finally:
            made.unmount()


@pytest.fixture
def hosted(parent: Parent) -> Iterator[Host]:
    """A pool in a directory there, with one block; the server runs."""
    (parent.path / "pool").mkdir()
    made = Host(parent.path / "pool")
    put(made.start(), ROOT_INODE, b"a", b"x" * 5000)
    settle(made.store)
    try:
        yield made
    finally:
        made.end()


def test_a_directory_cut_off_within_one_boot_is_rebuilt(
    parent: Parent, hosted: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """The boot id alone would vouch for pages that never reached the device."""
    hosted.store.sync_device()
    put(hosted.store, ROOT_INODE, b"b", b"y" * 5000)
    hosted.kill()
    parent.cut_off()
    caplog.clear()
    found = tree(hosted.start())
    assert "its index is rebuilt" in caplog.text
    assert found[b"/a"] == b"x" * 5000
    assert found.get(b"/b", b"y" * 5000) == b"y" * 5000
    hosted.stop()
    assert hosted.check().problems == []


def test_a_killed_server_of_a_directory_is_believed_while_it_stays_mounted(
    parent: Parent, hosted: Host, caplog: pytest.LogCaptureFixture
) -> None:
    hosted.kill()
    caplog.clear()
    assert tree(hosted.start()) == {b"/a": b"x" * 5000}
    assert "rebuilt" not in caplog.text
    hosted.stop()
    parent.unmount()
    parent.mount()
    assert tree(hosted.start()) == {b"/a": b"x" * 5000}
    assert "rebuilt" not in caplog.text, "it was stopped cleanly"


def test_all_mounts_of_one_instance_are_one(parent: Parent, tmp_path: Path) -> None:
    """A container has a bind mount of its own."""

    def word(path: Path) -> str:
        fd = os.open(path, os.O_RDONLY)
        try:
            return superblock_of(fd, "xfs")
        finally:
            os.close(fd)

    before = word(parent.path)
    subprocess.run(["mount", "--bind", parent.path, tmp_path], check=True)
    try:
        assert word(tmp_path) == before
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    parent.unmount()
    parent.mount()
    assert word(parent.path) != before


def test_what_cannot_be_told_is_never_the_same(tmp_path: Path) -> None:
    """Without a directory in sysfs the mount tells, without that nothing does."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        mount = superblock_of(fd, "no-such-type")
        assert mount == superblock_of(fd, "no-such-type")
        assert mount.startswith("mount ")
        assert superblock_of(fd, "tmpfs") == "", "its content goes with it"
    finally:
        os.close(fd)
