"""A full pool on a drive of its own (XFS), where all may go: whoever stores, in whatever way.

Each block is small beside the pool, and no call fails.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, loop_device, skip_without_mounts, workplace

pytestmark = pytest.mark.needs_loop

MIB: Final = 1 << 20
DRIVE_BYTES: Final = 512 * MIB


@pytest.fixture(params=["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A fresh pool on a drive, on each data path."""
    skip_without_mounts()
    with (
        workplace("disk") as place,
        loop_device(DRIVE_BYTES) as device,
        Mounted(device, place / "kv", f"--data-path={request.param}") as mount,
    ):
        yield mount
        mount.stop()
        assert mount.errors() == []


def store(root: Path, name: str, size_bytes: int, *, direct: bool, ahead: bool) -> None:
    """Store a block: all of it in one write, and *ahead* of it allocated."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = os.open(root / f"{name}.tmp", flags)
    with mmap.mmap(-1, size_bytes) as memory:  # aligned, as direct I/O wants it
        memory[:8] = memory[-8:] = name.encode().ljust(8)
        try:
            if ahead:
                os.posix_fallocate(fd, 0, size_bytes)
            assert os.pwrite(fd, memory, 0) == size_bytes
        finally:
            os.close(fd)
    os.rename(root / f"{name}.tmp", root / name)


def store_many(
    root: Path,
    names: list[str],
    size_bytes: int,
    *,
    writers: int = 1,
    direct: bool = False,
    ahead: bool = False,
) -> None:
    """Store blocks under *names* by so many *writers* at a time; raise what a call raised."""
    failures: list[BaseException] = []

    def work(part: list[str]) -> None:
        try:
            for name in part:
                store(root, name, size_bytes, direct=direct, ahead=ahead)
        except (OSError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(names[i::writers],)) for i in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def assert_whole(root: Path, size_bytes: int) -> int:
    """Expect each block that is there to be whole; return how many are."""
    whole = 0
    for name in os.listdir(root):
        with contextlib.suppress(FileNotFoundError), (root / name).open("rb") as file:
            stamp = name.encode().ljust(8)
            assert os.fstat(file.fileno()).st_size == size_bytes
            assert file.read(8) == stamp
            assert os.pread(file.fileno(), 8, size_bytes - 8) == stamp
            whole += 1
    return whole


def test_blocks_that_are_allocated_before_they_are_written(mounted: Mounted) -> None:
    """[capacity] What is reserved already needs no room a second time."""
    names = [f"a{number}" for number in range(40)]
    store_many(mounted.path, names, 16 * MIB, ahead=True)
    assert assert_whole(mounted.path, 16 * MIB) > 15
    more = [f"b{number}" for number in range(40)]
    store_many(mounted.path, more, 16 * MIB, writers=4, ahead=True)
    assert assert_whole(mounted.path, 16 * MIB) > 15
    assert mounted.status()["eviction"]["blocks"] > 40


def scatter(path: Path, writes: int) -> None:
    """Write 2,560 bytes every 10 MiB of a new file; it soon holds little more."""
    with path.open("xb", buffering=0) as file:
        for number in range(writes):
            file.seek(number * 10 * MIB)
            assert file.write(b"%04d" % number * 640) == 2560
    # The unused reserve is given back by a thread, which waits for the device.
    most_bytes = 2 * writes * 4096
    until(lambda: path.stat().st_blocks * 512 <= most_bytes, "the reserve is given back")


def assert_scattered(path: Path, writes: int) -> None:
    """Expect every byte of it, zeros between included."""
    with path.open("rb") as file:
        assert os.fstat(file.fileno()).st_size == (writes - 1) * 10 * MIB + 2560
        for number in range(writes):
            at = number * 10 * MIB
            assert os.pread(file.fileno(), 2560, at) == b"%04d" % number * 640
            assert os.pread(file.fileno(), 4096, at + 2560) in (bytes(4096), b"")


def test_small_writes_far_from_each_other(mounted: Mounted) -> None:
    """[capacity] Each holds its blocks and nothing ahead of them, which would fill the pool."""
    scatter(mounted.path / "few", 100)
    scatter(mounted.path / "many", 1000)
    assert_scattered(mounted.path / "many", 1000)
    blocks = mounted.path / "blocks"
    blocks.mkdir()
    store_many(blocks, [str(number) for number in range(70)], 8 * MIB)
    assert mounted.status()["eviction"]["blocks"] > 20
    (mounted.path / "new").mkdir()
    scatter(mounted.path / "new" / "last", 1000)
    assert_scattered(mounted.path / "new" / "last", 1000)
    assert_whole(blocks, 8 * MIB)


def test_who_maps_a_file_with_holes_writes_there_after_the_close(mounted: Mounted) -> None:
    """[capacity] What was reserved for it is given back at the close, but not under a mapping."""
    for number in range(4):
        store(mounted.path, f"usual{number}", 8 * MIB, direct=False, ahead=False)
    with (mounted.path / "holes").open("x+b", buffering=0) as file:
        assert file.write(b"first") == 5
        file.seek(40 * MIB)
        assert file.write(b"last") == 4
        assert os.fstat(file.fileno()).st_blocks * 512 > 8 * MIB
        mapping = mmap.mmap(file.fileno(), 4096, offset=2 * MIB)
    with mapping:
        mapping[:6] = b"middle"
    with (mounted.path / "holes").open("rb") as file:
        found = file.read()
    assert (found[:5], found[2 * MIB :][:6], found[40 * MIB :]) == (b"first", b"middle", b"last")
    assert len(found) - found.count(b"\0") == 15


def test_the_first_blocks_of_a_directory_are_larger_than_all_before(mounted: Mounted) -> None:
    """[capacity] Many at a time, each in one write: nobody knew that so much would be needed."""
    small, large = mounted.path / "small", mounted.path / "large"
    small.mkdir()
    large.mkdir()
    store_many(small, [str(number) for number in range(120)], 4 * MIB)
    assert mounted.status()["eviction"]["blocks"] > 20
    names = [str(number) for number in range(6)]
    store_many(large, names, 32 * MIB, writers=6, direct=True)
    assert assert_whole(large, 32 * MIB) == 6
    assert mounted.status()["eviction"]["overruns"] == 0
    with (large / "refused.tmp").open("xb") as file:
        file.write(bytes(32 * MIB))
    os.unlink(large / "refused.tmp")  # as a writer does whose write failed
    status = mounted.status()
    assert status["eviction"]["abandoned_drafts"] == int(status["data_path"] == "passthrough")
