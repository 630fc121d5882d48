"""The files of a pool on several drives: each inode's are on its own, and nowhere else."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.pool_layout import EXTENTS, IDENTITIES, QUARANTINE, STRAYS, file_name
from kvfs.core.records import Identity
from kvfs.core.types import DriveNo, InodeNo, Sequence
from kvfs.storage.extents import Extents
from kvfs.storage.kept_aside import Quarantine, StrayFiles
from kvfs.storage.syscalls import Syscalls
from tests.support.mounts.mounting import workplace

_DRIVES = 3
#: One inode on each drive; the one on the last drive is the oldest.
INODES = [Numbering(_DRIVES).inode(DriveNo(at), InodeNo(0x1FF - at)) for at in range(_DRIVES)]


class Drives:
    """Three directories, the files in them, and where each file is."""

    def __init__(self, place: Path) -> None:
        self.paths = [place / str(at) for at in range(_DRIVES)]
        for path in self.paths:
            path.mkdir()
        self.fds = tuple(os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in self.paths)
        self.extents = Extents(self.fds, Syscalls(), "tmpfs")

    def close(self) -> None:
        self.extents.close()
        for fd in self.fds:
            os.close(fd)

    def where(self, ino: InodeNo, top: str) -> list[int]:
        """Return which drives have a file of *ino* below *top*."""
        name = file_name(ino)
        return [at for at, path in enumerate(self.paths) if list((path / top).rglob(name))]

    def fill(self) -> None:
        for ino in INODES:
            os.close(self.extents.create(ino, 4096))


@pytest.fixture
def drives() -> Iterator[Drives]:
    with workplace() as place:
        made = Drives(place)
        yield made
        made.close()


def identity_of(ino: InodeNo, mode: int = stat.S_IFREG) -> Identity:
    name = b"name"
    return Identity(ino, InodeNo(1), Sequence(7), mode | 0o644, 5, 6, 0, 1, 0, 0, name)


def test_an_extent_lies_on_the_drive_of_its_inode(drives: Drives) -> None:
    drives.fill()
    assert [drives.where(ino, EXTENTS) for ino in INODES] == [[0], [1], [2]]
    assert sorted(drives.extents.scan()) == sorted(INODES)
    for ino in INODES:
        os.close(drives.extents.open(ino, os.O_RDONLY))
        assert drives.extents.stat(ino) is not None
        drives.extents.unlink(ino)
    assert [drives.where(ino, EXTENTS) for ino in INODES] == [[], [], []]


def test_identities_go_with_their_files(drives: Drives) -> None:
    drives.fill()
    for ino in INODES:
        assert drives.extents.identify(ino, identity_of(ino))
        drives.extents.identify_node(ino, identity_of(ino, stat.S_IFDIR))
    assert [drives.extents.identity(ino) for ino in INODES] == [*map(identity_of, INODES)]
    assert [drives.where(ino, IDENTITIES) for ino in INODES] == [[0], [1], [2]]
    assert sorted(drives.extents.scan_nodes()) == sorted(INODES)


def test_open_directories_are_those_of_all_drives(drives: Drives) -> None:
    drives.fill()
    again = Extents(drives.fds, Syscalls(), "tmpfs")
    try:
        assert [again.open_cached(ino, os.O_RDONLY) for ino in INODES] == [-1, -1, -1]
        again.open_directories()
        fds = [again.open_cached(ino, os.O_RDONLY) for ino in INODES]
        assert min(fds) >= 0
        for fd in fds:
            os.close(fd)
    finally:
        again.close()


def test_an_old_inode_of_a_later_drive_is_emptied_for_a_dead_mount(drives: Drives) -> None:
    drives.fill()
    drives.extents.held_below = InodeNo(0x1FF)  # older than that: all but the one on drive 0
    held = [drives.extents.open(ino, os.O_PATH) for ino in INODES]
    for ino in INODES:
        drives.extents.unlink(ino)
    assert [os.fstat(fd).st_blocks for fd in held] == [8, 0, 0]
    for fd in held:
        os.close(fd)


def test_strays_stay_on_their_drive(drives: Drives) -> None:
    drives.fill()
    strays = StrayFiles(drives.fds, Syscalls(), drives.extents)
    for now_ns, ino in enumerate(INODES, 1):
        assert strays.move_in(ino, now_ns, of_node=False) is not None
    assert [drives.where(ino, STRAYS) for ino in INODES] == [[0], [1], [2]]
    assert [stray.ino for stray in strays.held()] == INODES
    strays.remove(INODES[2])
    assert [stray.ino for stray in strays.held()] == INODES[:2]


def test_quarantine_is_bounded_over_all_drives_and_loses_the_oldest(drives: Drives) -> None:
    drives.fill()
    quarantine = Quarantine(drives.fds, Syscalls(), files_max=2, most_bytes=1 << 20)
    for ino in reversed(INODES):
        assert quarantine.move_in(drives.extents, ino)
    assert sorted(quarantine.held()) == INODES[:2]
    assert [drives.where(ino, QUARANTINE) for ino in INODES] == [[0], [1], []]
    quarantine.clear()
    assert not quarantine.held()
