"""Mounts of pools of three drives, for tests: what is stored, on which, and one that fails."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvfs.core.drives import Numbering
from kvfs.core.source_list import sources_of
from kvfs.core.types import InodeNo
from tests.support.clients.stamped import stamped
from tests.support.clients.stepping import until
from tests.support.devices.power_cuts.power import Cut, shut_down
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


def _root_of(mount: Mounted, drive: int) -> Path:
    """Return a way to the root of the file system of *drive*, which the server has for itself."""
    for link in Path(f"/proc/{mount.server_pid}/fd").iterdir():
        header = link / "POOL"
        if os.readlink(link) == "/" and header.is_file():
            said = json.loads(header.read_text())
            if said["drive"] == drive:
                return link
    raise AssertionError(f"the server does not have drive {drive}")


def fail_drive(mount: Mounted, drive: int) -> None:
    """Shut its file system down, and wait until the server knows."""
    root = os.open(_root_of(mount, drive), os.O_RDONLY | os.O_DIRECTORY)
    try:
        shut_down(root, Cut.NOTHING)
    finally:
        os.close(root)
    until(lambda: mount.status()["drives"][f"{drive}"]["state"] == "failed", "it has failed")
