"""Mounts of pools of three drives, for tests: what is stored there, and on which."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvfs.core.drives import Numbering
from kvfs.core.source_list import sources_of
from kvfs.core.types import InodeNo
from tests.support.clients.stamped import stamped
from tests.support.mounts.mounting import Mounted, own_tmpfs

DRIVES: Final = 3


@contextlib.contextmanager
def blank_drives() -> Iterator[list[str]]:
    """Yield directories, each in memory of its own."""
    with contextlib.ExitStack() as stack:
        yield [str(stack.enter_context(own_tmpfs())) for _ in range(DRIVES)]


def store(path: Path, name: str, size_bytes: int, seed: int) -> None:
    """Store as a connector does."""
    temporary = path / f"{name}.tmp"
    temporary.write_bytes(stamped(name, size_bytes, seed))
    temporary.rename(path / name)


def drives_of(path: Path) -> list[int]:
    """Return how many blocks lie on each drive, by their inode numbers."""
    found = [0] * DRIVES
    for entry in os.scandir(path):
        found[Numbering(DRIVES).drive(InodeNo(entry.inode()))] += 1
    return found


def names_on(path: Path, drive: int) -> set[str]:
    """Return the names of the blocks in the directory *path* that lie on *drive*."""
    drive_of = Numbering(DRIVES).drive
    return {entry.name for entry in os.scandir(path) if drive_of(InodeNo(entry.inode())) == drive}


def extents_of(mount: Mounted) -> list[int]:
    """Return the bytes of the extents on each drive."""
    return [
        sum(file.stat().st_blocks * 512 for file in (Path(drive) / "extents").glob("??/*"))
        for drive in sources_of(mount.source)
    ]
