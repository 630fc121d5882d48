"""Handles over what happens to an index: each leads to its block or is ESTALE, never to another.

On a real mount, whose nodes the kernel has forgotten. What a name leads to opens by its handle.
"""

import os
import random
import shutil
from collections.abc import Iterator
from errno import ESTALE
from pathlib import Path
from typing import Final

import pytest

from tests.support.devices.power_cuts.power import Cut, shut_down
from tests.support.kernel.caches import forget_names
from tests.support.kernel.calls import opened, read_file, write_file
from tests.support.kernel.file_handles import FileHandle, opened_by
from tests.support.mounts.mounting import Mounted, loop_device, run_kvfs
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse

DIRECTORIES: Final = 6
EACH: Final = 12
SIZES: Final = (1, 4096, 5000, 70_000)
STALE: Final = b"ESTALE"


class Given:
    """All handles that were ever taken on a mount, each with what it was taken of."""

    def __init__(self, mount: Mounted) -> None:
        self._mount = mount
        self._random = random.Random(17)
        self.blocks: dict[FileHandle, bytes] = {}
        self.directories: dict[FileHandle, bytes] = {}
        self._stored = 0

    def store(self, directory: Path, name: str) -> None:
        """Store a block that has no equal, and take its handle."""
        self._stored += 1
        size_bytes = SIZES[self._stored % len(SIZES)]
        content = b"%d:" % self._stored + self._random.randbytes(size_bytes)
        write_file(directory / f"{name}.tmp", content)
        os.rename(directory / f"{name}.tmp", directory / name)
        self.blocks[FileHandle.of(directory / name)] = content

    def make(self, name: str) -> None:
        """Make a directory, full of blocks, and take its handle. It keeps its mode."""
        directory = self._mount.path / name
        directory.mkdir()
        for number in range(EACH):
            self.store(directory, f"b{number}")
        os.setxattr(directory, "user.made", mark := self._random.randbytes(8).hex().encode())
        self.directories[FileHandle.of(directory)] = mark

    def fill(self) -> None:
        """Make all kinds of what is there and what is not any more."""
        path = self._mount.path
        for number in range(DIRECTORIES):
            self.make(f"d{number}")
        for number in range(EACH):
            self.store(path / "d0", f"b{number}")  # over others
            os.unlink(path / "d1" / f"b{number}")
            os.rename(path / "d3" / f"b{number}", path / "d4" / f"m{number}")
        run_kvfs("evict", str(path / "d2"))
        os.rename(path / "d5", path / "d0" / "e5")
        os.rmdir(path / "d3")

    def store_others(self) -> None:
        """Store so much that each node that was ever given out could be given out again."""
        for number in range(2):
            self.make(f"other-{number}-{self._stored}")

    def check(self) -> int:
        """Open each handle, and compare with what is found by name. Return how many led to it."""
        path = self._mount.path
        forget_names(path)
        with opened(path, os.O_RDONLY) as root_fd:
            found = {handle: self._block(handle, root_fd) for handle in self.blocks}
            marks = {handle: self._mark(handle, root_fd) for handle in self.directories}
        for handle, content in self.blocks.items():
            assert found[handle] in (content, STALE)
        for handle, mark in self.directories.items():
            # Extended attributes of directories are not rebuilt.
            assert marks[handle] in (mark, b"", STALE)
        named = {}
        for top, directories, files in os.walk(path):
            for name in directories:
                handle = FileHandle.of(Path(top, name))
                assert marks[handle] != STALE
                if marks[handle]:
                    assert os.getxattr(Path(top, name), "user.made") == marks[handle]
            for name in files:
                handle = FileHandle.of(Path(top, name))
                try:
                    named[handle] = read_file(Path(top, name))
                except FileNotFoundError:
                    continue
                assert named[handle] == found[handle]
        assert {handle for handle, content in found.items() if content != STALE} == set(named)
        return len(named)

    def _block(self, handle: FileHandle, root_fd: int) -> bytes:
        try:
            return handle.read(root_fd)
        except OSError as error:
            if error.errno != ESTALE:
                raise
            return STALE

    def _mark(self, handle: FileHandle, root_fd: int) -> bytes:
        try:
            with opened_by(handle, root_fd) as fd:
                shown = os.readlink(f"/proc/self/fd/{fd}")
                assert os.path.samestat(os.stat(shown), os.fstat(fd))
                return os.getxattr(fd, "user.made") if "user.made" in os.listxattr(fd) else b""
        except OSError as error:
            if error.errno != ESTALE:
                raise
            return STALE


#: In d0, other than in d1 and d2, in d4 twice and in e5.
LEFT: Final = 4 * EACH


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def test_the_server_is_killed(place: Path) -> None:
    """[handles] All that was there is there."""
    with small_mount(place) as mount:
        given = Given(mount)
        given.fill()
        assert given.check() == LEFT
        mount.kill_daemon()
        mount.start()
        given.store_others()
        assert given.check() == LEFT + 2 * EACH


def test_the_index_is_rebuilt_from_garbage(place: Path) -> None:
    """[handles] By fsck, which finds every block that was whole."""
    with small_mount(place) as mount:
        given = Given(mount)
        given.fill()
        mount.stop()
        for copy in (place / "pool" / "log").glob("copy.*"):
            copy.write_bytes(os.urandom(copy.stat().st_size))
        run_kvfs("fsck", "--repair", str(place / "pool"))
        mount.start()
        given.store_others()
        assert given.check() == LEFT + 2 * EACH


def test_the_numbers_are_lost_with_the_index(place: Path) -> None:
    """[handles] The highest number that is found may be far below those that were given out."""
    with small_mount(place) as mount:
        given = Given(mount)
        given.fill()
        run_kvfs("evict", str(mount.path))
        mount.stop()
        for copy in (place / "pool" / "log").glob("copy.*"):
            copy.write_bytes(os.urandom(copy.stat().st_size))
        (place / "pool" / "INODES").unlink()
        run_kvfs("fsck", "--repair", str(place / "pool"))
        mount.start()
        given.store_others()
        assert given.check() == 2 * EACH


@pytest.mark.parametrize("clean", [True, False])
def test_an_older_index_is_put_back(place: Path, clean: bool) -> None:
    """[handles] Its log knows blocks that are gone, and none of the new ones."""
    index, former = place / "pool" / "log", place / "log"
    with small_mount(place) as mount:
        given = Given(mount)
        given.fill()
        before = given.check()
        mount.stop()
        shutil.copytree(index, former)
        mount.start()
        path = mount.path
        for number in range(EACH):
            given.store(path / "d0", f"b{number}")
            os.unlink(path / "d4" / f"m{number}")
            os.rename(path / "d4" / f"b{number}", path / f"b{number}")
        run_kvfs("evict", str(path / "d0" / "e5"))
        given.store_others()
        if clean:
            mount.stop()
        else:
            mount.kill_daemon()
        shutil.rmtree(index)
        shutil.copytree(former, index)
        mount.start()
        given.store_others()
        assert before == LEFT
        found, left = given.check(), EACH + 2 * EACH
        # At least what was in d4 since before, and what came last: the rest is compared with files.
        assert found >= left


@pytest.mark.needs_loop
@pytest.mark.parametrize("cut", Cut)
def test_the_power_is_lost(place: Path, cut: Cut) -> None:
    """[handles] What was not synced is gone, and its nodes are given to nobody else."""
    with loop_device(512 << 20) as device, Mounted(device, place / "kv") as mount:
        given = Given(mount)
        given.fill()
        mount.remount()
        given.store_others()
        with opened(pool_of(mount), os.O_RDONLY | os.O_DIRECTORY) as pool_fd:
            shut_down(pool_fd, cut)
        mount.kill_daemon()
        mount.start()
        given.store_others()
        assert given.check() >= LEFT + 2 * EACH


def pool_of(mount: Mounted) -> Path:
    """Return a path to the root of the file system that only the server has."""
    for link in Path(f"/proc/{mount.server_pid}/fd").iterdir():
        if (link / "POOL").exists():
            return link
    raise AssertionError("the server has no pool open")
