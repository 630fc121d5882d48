"""A pool on an XFS that others fill to its last block: kvfs gives way, and goes on."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel.calls import refused
from tests.support.mounts.mounting import (
    Mounted,
    loop_device,
    mounted_at,
    skip_without_mounts,
    workplace,
)

MIB = 1 << 20
DEVICE_BYTES = 512 * MIB
BLOCK_BYTES = 2 * MIB


@pytest.fixture
def shared_xfs() -> Iterator[Path]:
    """A small XFS that a pool shares with others."""
    skip_without_mounts()
    with (
        workplace("disk") as place,
        loop_device(DEVICE_BYTES, format_xfs=True) as device,
        mounted_at(place / "xfs", "-t", "xfs", device) as xfs,
    ):
        yield xfs


@contextlib.contextmanager
def pool_on(shared_xfs: Path, capacity_bytes: int, path: str) -> Iterator[Mounted]:
    """Mount a pool beside what others have there."""
    (shared_xfs / "pool").mkdir()
    flags = (f"--capacity={capacity_bytes}", f"--data-path={path}")
    with Mounted(shared_xfs / "pool", shared_xfs.parent / "kv", *flags) as mounted:
        yield mounted


def store(root: Path, name: str) -> None:
    """Store one block, as connectors do."""
    with (root / f"{name}.tmp").open("wb", buffering=0) as file:
        assert file.write(name.encode()[:1] * BLOCK_BYTES) == BLOCK_BYTES
    os.rename(root / f"{name}.tmp", root / name)


def fill_to_the_last_block(path: Path) -> None:
    """Write until the file system takes nothing more, not even one of its blocks.

    kvfs gives up its ready extents meanwhile, when it finds the device full.
    """
    with path.open("ab", buffering=0) as file:
        for step in (16 * MIB, MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
    with refused(errno.ENOSPC), path.open("ab", buffering=0) as file:
        for _ in range(DEVICE_BYTES // 4096):
            file.write(bytes(4096))


@pytest.mark.parametrize("path", ["daemon", "passthrough"])
def test_blocks_give_way_when_others_fill_the_file_system(shared_xfs: Path, path: str) -> None:
    """The index stays writable, what was stored stays readable, and storing goes on."""
    with pool_on(shared_xfs, DEVICE_BYTES // 4, path) as mounted:
        for number in range(30):
            store(mounted.path, f"a{number}")
        assert mounted.status()["eviction"]["blocks"] == 0
        fill_to_the_last_block(shared_xfs / "filler")
        for number in range(30):
            store(mounted.path, f"b{number}")
        status = mounted.status()
        assert status["eviction"]["blocks"] > 0
        assert status["usable_bytes"] < status["capacity_bytes"]
        assert os.statvfs(mounted.path).f_blocks * 4096 == status["capacity_bytes"]
        read = 0
        for name in os.listdir(mounted.path):
            with contextlib.suppress(FileNotFoundError):  # XFS refills what it keeps for itself
                assert (mounted.path / name).read_bytes() == name.encode()[:1] * BLOCK_BYTES
                read += 1
        assert read > 0
        os.mkdir(mounted.path / "d")
        for name in os.listdir(mounted.path):
            with contextlib.suppress(FileNotFoundError):
                (mounted.path / name).unlink() if name != "d" else os.rmdir(mounted.path / name)
        mounted.stop()
        mounted.start()
        assert os.listdir(mounted.path) == []


@pytest.mark.parametrize("path", ["daemon", "passthrough"])
def test_a_draft_takes_no_more_than_what_is_written(shared_xfs: Path, path: str) -> None:
    """XFS allocates ahead of an appending writer as much again, for which nobody made room."""
    with pool_on(shared_xfs, DEVICE_BYTES // 8, path) as mounted:
        with (mounted.path / "large.tmp").open("wb", buffering=0) as draft:
            for _ in range(20):
                assert draft.write(bytes(MIB)) == MIB
            assert mounted.status()["used_bytes"] == 20 * MIB
        mounted.stop()
