"""Devices of every kind: made, opened, held, released, destroyed; on real drives of a loop."""

import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.errors import (
    NoSpace,
    SourceBlank,
    SourceBusy,
    SourceDamaged,
    SourceForeign,
    SourceFull,
    UsageError,
)
from kvfs.core.pool_layout import FAN_OUT
from kvfs.devices import (
    DirectoryReserve,
    destroy_source,
    image,
    loop,
    open_source,
    pool_tree,
    recognise,
    wait_released,
)
from kvfs.devices.detached import mount_detached
from kvfs.devices.device import image_size_bytes, reserve_bytes, xfs_usable_bytes
from tests.support.devices.loop import loops_over
from tests.support.devices.pools import (
    DRIVE_BYTES,
    MIB,
    Source,
    blank_source,
    format_source,
    refused,
)
from tests.support.mounts.mounting import ROOT, workplace

GIB = 1 << 30
#: linux/fs.h and xfs_fs.h: stop the file system as a crash would, without the log's last items.
XFS_IOC_GOINGDOWN = 0x8004587D
GOING_FLAGS_LOGFLUSH = 1


@pytest.fixture(
    params=[
        pytest.param("block", marks=pytest.mark.needs_loop),
        pytest.param("image", marks=pytest.mark.needs_loop),
        "directory",
    ]
)
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    with blank_source(request.param) as source:
        yield source


# ---- a pool's life ----


def test_a_pool_is_made_opened_and_destroyed(source: Source) -> None:
    with refused(SourceBlank, source.path, "kvfs mkfs"):
        open_source(source.path)
    header = format_source(source.path)
    with open_source(source.path) as device:
        assert device.kind == recognise(source.path)
        assert (device.epoch, device.uuid) == (header.epoch, header.uuid)
        assert device.fs_type == ("tmpfs" if device.kind == "directory" else "xfs")
        assert fcntl.fcntl(device.pool_fd, fcntl.F_GETFL) & os.O_DIRECTORY
        assert sorted(os.listdir(device.pool_fd)) == [
            "LOCK", "POOL", "extents", "identities", "index",
        ]  # fmt: skip
        for top in ("extents", "identities"):
            names = os.listdir(f"/proc/self/fd/{device.pool_fd}/{top}")
            assert sorted(names) == [f"{slot:02x}" for slot in range(FAN_OUT)]
        assert source.path in device.describe()
    destroy_source(source.path)
    with refused(SourceBlank, source.path):
        open_source(source.path)


def test_what_was_written_is_there_again(source: Source) -> None:
    format_source(source.path)
    with open_source(source.path) as device:
        path = Path(f"/proc/self/fd/{device.pool_fd}/extents/00/file")
        free_bytes = device.free_bytes()
        path.write_bytes(b"k" * 10 * MIB)
        assert free_bytes - 11 * MIB <= device.free_bytes() <= free_bytes - 9 * MIB
        assert device.capacity_bytes <= device.usable_bytes < device.total_bytes()
    with open_source(source.path, read_only=True) as device:
        fd = os.open("extents/00/file", os.O_RDONLY, dir_fd=device.pool_fd)
        with os.fdopen(fd, "rb") as file:
            assert file.read() == b"k" * 10 * MIB


def test_the_header_is_written_last(source: Source) -> None:
    seen: list[list[str]] = []

    def fill(pool_fd: int) -> None:
        seen.append(sorted(os.listdir(pool_fd)))
        os.close(os.open("index/data.mdb", os.O_CREAT | os.O_WRONLY, dir_fd=pool_fd))

    format_source(source.path, fill=fill)
    assert seen == [["LOCK", "extents", "identities", "index"]]
    with open_source(source.path) as device:
        assert os.listdir(f"/proc/self/fd/{device.pool_fd}/index") == ["data.mdb"]
        header = json.loads(Path(f"/proc/self/fd/{device.pool_fd}/POOL").read_bytes())
        assert header["format"] == 1
        assert header["epoch"] == device.epoch


def test_force_makes_a_new_pool_in_place_of_the_old(source: Source) -> None:
    first = format_source(source.path, capacity_bytes=64 * MIB)
    with open_source(source.path) as device:
        Path(f"/proc/self/fd/{device.pool_fd}/extents/00/{16:016x}").write_bytes(b"old")
    second = format_source(source.path, force=True)
    assert first.uuid != second.uuid
    with open_source(source.path) as device:
        assert device.uuid == second.uuid
        assert os.listdir(f"/proc/self/fd/{device.pool_fd}/extents/00") == []


@pytest.mark.parametrize("failure", [NoSpace("index"), OSError(28, "No space left on device")])
def test_a_pool_that_could_not_be_filled_is_none(source: Source, failure: Exception) -> None:
    def fill(pool_fd: int) -> None:
        os.close(os.open("INODES", os.O_CREAT | os.O_WRONLY, dir_fd=pool_fd))
        raise failure

    with refused(SourceFull, source.path, "no room"):
        format_source(source.path, fill=fill)
    wait_released(source.path)
    if recognise(source.path) == "directory":
        with refused(SourceBlank, source.path):
            open_source(source.path)
    format_source(source.path, force=True)


# ---- held and released ----


def test_one_holder_at_a_time(source: Source) -> None:
    format_source(source.path)
    with open_source(source.path):
        for attempt in (open_source, destroy_source):
            with refused(SourceBusy, source.path):
                attempt(source.path)
        with refused(SourceBusy, source.path):
            open_source(source.path, read_only=True)
        with refused(SourceBusy, source.path):
            format_source(source.path, force=True)
        with refused(SourceBusy, source.path):
            wait_released(source.path, wait_s=0.02)
    destroy_source(source.path)


def test_a_killed_holder_gives_its_source_back(source: Source) -> None:
    format_source(source.path)
    code = (
        "import sys\nfrom kvfs.devices import open_source\n"
        "device = open_source(sys.argv[1])\nprint('open', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, source.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with refused(SourceBusy):
            open_source(source.path)
        holder.send_signal(signal.SIGKILL)
    wait_released(source.path)
    open_source(source.path).close()
    destroy_source(source.path)


@pytest.mark.parametrize("kind", ["block", "image"])
@pytest.mark.needs_loop
def test_a_crashed_pool_is_looked_at_and_recovered(kind: str) -> None:
    with blank_source(kind) as source:
        format_source(source.path)
        with open_source(source.path) as device:
            fd = os.open("extents/07/late", os.O_CREAT | os.O_WRONLY, dir_fd=device.pool_fd)
            os.fsync(fd)
            os.close(fd)
            fcntl.ioctl(device.pool_fd, XFS_IOC_GOINGDOWN, struct.pack("I", GOING_FLAGS_LOGFLUSH))
        with open_source(source.path) as device:
            assert os.listdir(f"/proc/self/fd/{device.pool_fd}/extents/07") == ["late"]


def test_a_second_close_does_nothing(source: Source) -> None:
    format_source(source.path)
    device = open_source(source.path)
    device.close()
    device.close()
    assert device.pool_fd == -1


# ---- capacity ----


def test_capacity_is_kept_and_may_be_overridden(source: Source) -> None:
    format_source(source.path, capacity_bytes=100 * MIB)
    with open_source(source.path) as device:
        assert device.capacity_bytes == 100 * MIB
        usable_bytes = device.usable_bytes
    for override_bytes in (10 * MIB, 150 * MIB, usable_bytes):
        with open_source(source.path, capacity_bytes=override_bytes) as device:
            assert device.capacity_bytes == override_bytes
    with refused(UsageError, source.path):
        open_source(source.path, capacity_bytes=usable_bytes + 1)


def test_without_a_capacity_blocks_get_what_is_left(source: Source) -> None:
    format_source(source.path)
    with open_source(source.path) as device:
        assert device.total_bytes() // 2 < device.usable_bytes < device.total_bytes()
        if device.kind == "directory":
            assert device.capacity_bytes <= device.free_bytes()
        else:
            assert device.capacity_bytes == device.usable_bytes <= device.free_bytes()


@pytest.mark.parametrize(
    ("total_bytes", "kept_bytes"),
    [(GIB, GIB // 4), (4 * GIB, GIB), (10 * GIB, GIB), (100 * GIB, 5 * GIB), (GIB << 10, 10 * GIB)],
)
def test_a_directory_leaves_its_parent_a_reserve(total_bytes: int, kept_bytes: int) -> None:
    assert reserve_bytes(total_bytes, DirectoryReserve()) == kept_bytes
    assert reserve_bytes(total_bytes, DirectoryReserve(share=0)) == 0


def test_a_directory_takes_neither_the_reserve_nor_what_others_have() -> None:
    with memory_directory(512 * MIB) as path:
        Path(path, "..", "other").write_bytes(b"k" * 100 * MIB)
        format_source(path)
        with open_source(path) as device:
            assert device.usable_bytes == 384 * MIB, "a quarter of a small file system is kept"
            assert 284 * MIB - MIB < device.free_bytes() <= 284 * MIB
            assert device.capacity_bytes < device.free_bytes()


@pytest.mark.parametrize("capacity_bytes", [MIB, 300 * MIB, GIB, 50 * GIB, 20 << 40])
def test_an_image_is_made_large_enough(capacity_bytes: int) -> None:
    size_bytes = image_size_bytes(capacity_bytes)
    assert xfs_usable_bytes(size_bytes) >= capacity_bytes
    assert size_bytes <= capacity_bytes * 1.03 + 600 * MIB


def test_the_log_of_a_large_xfs_is_as_long_as_mkfs_makes_it() -> None:
    size_bytes = 16 << 40
    left_bytes = size_bytes - 2 * GIB - 16 * MIB
    assert xfs_usable_bytes(size_bytes) == left_bytes - left_bytes // 100


# ---- images ----


@pytest.mark.needs_loop
def test_an_image_is_created_in_full_for_a_capacity() -> None:
    with workplace("disk") as place:
        path = place / "image"
        with refused(SourceBlank, "does not exist yet"):
            open_source(str(path), capacity_bytes=200 * MIB)
        format_source(str(path), capacity_bytes=200 * MIB)
        status = path.stat()
        assert status.st_blocks * 512 >= status.st_size, "mkfs has not discarded the blocks"
        assert status.st_mode & 0o777 == 0o600
        with open_source(str(path), capacity_bytes=200 * MIB) as device:
            assert device.capacity_bytes == 200 * MIB
            (attached,) = loops_over(path)
            flags = subprocess.run(
                ["losetup", "--noheadings", "--output", "AUTOCLEAR,RO", attached],
                check=True,
                capture_output=True,
                text=True,
            )
            assert flags.stdout.split() == ["1", "0"]
        wait_released(str(path))
        assert loops_over(path) == []


@pytest.mark.needs_loop
def test_a_size_makes_an_image_of_that_size() -> None:
    with workplace() as place:
        path = place / "image"
        format_source(str(path), size_bytes=DRIVE_BYTES)
        assert path.stat().st_size == DRIVE_BYTES
        with refused(UsageError, "already has a size"):
            format_source(str(path), size_bytes=DRIVE_BYTES + MIB, force=True)


@pytest.mark.needs_loop
def test_a_sparse_image_is_filled_with_blocks() -> None:
    with blank_source("image") as source:
        assert source.bytes_at.stat().st_blocks == 0
        format_source(source.path)
        assert source.bytes_at.stat().st_blocks * 512 >= DRIVE_BYTES
        destroy_source(source.path)
        assert source.bytes_at.stat().st_size == DRIVE_BYTES


@pytest.mark.needs_loop
def test_an_image_without_direct_io_is_used_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "_FLAG_DIRECT_IO", 0)
    with blank_source("image") as source:
        format_source(source.path)
        open_source(source.path).close()
    assert image.__name__ in {record.name for record in caplog.records}
    assert "direct I/O is not available" in caplog.text


# ---- directories ----


def test_destroy_leaves_what_is_not_the_pools() -> None:
    with blank_source("directory") as source:
        format_source(source.path)
        foreign = [source.bytes_at / name for name in ("note", "extents/00/mine", "index/other")]
        for path in foreign:
            path.write_text("keep")
        (source.bytes_at / f"extents/00/{99:016x}").write_text("block")
        destroy_source(source.path)
        left = sorted(path for path in source.bytes_at.rglob("*") if path.is_file())
        assert left == sorted(foreign)


def test_a_new_pool_leaves_what_is_not_the_pools() -> None:
    """It had removed the old pool when it met the directory of a file that is not its own."""
    with blank_source("directory") as source:
        format_source(source.path)
        foreign = [source.bytes_at / name for name in ("extents/00/mine", "index/other")]
        for path in foreign:
            path.write_text("keep")
        format_source(source.path, force=True)
        open_source(source.path).close()
        assert all(path.read_text() == "keep" for path in foreign)


def test_a_new_pool_names_what_is_in_its_way() -> None:
    with blank_source("directory") as source:
        format_source(source.path)
        (source.bytes_at / "extents/07").rmdir()
        (source.bytes_at / "extents/07").touch()
        with refused(SourceDamaged, source.path, "extents/07: File exists"):
            format_source(source.path, force=True)


def test_destroy_ends_what_an_interrupted_destroy_began(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str, directory_fd: int) -> None:
        if name == "RUN":
            raise KeyboardInterrupt
        unlink(name, directory_fd)

    unlink = pool_tree._unlink
    with blank_source("directory") as source:
        format_source(source.path)
        monkeypatch.setattr(pool_tree, "_unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            destroy_source(source.path)
        monkeypatch.undo()
        with refused(SourceForeign, source.path, "unfinished pool"):
            open_source(source.path)
        destroy_source(source.path)
        assert os.listdir(source.path) == []
        with refused(SourceBlank, source.path):
            destroy_source(source.path)


def test_an_empty_ext4_with_its_lost_and_found_is_blank() -> None:
    with blank_source("directory") as source:
        (source.bytes_at / "lost+found").mkdir()
        format_source(source.path)
        destroy_source(source.path)
        assert os.listdir(source.path) == ["lost+found"]


@contextlib.contextmanager
def memory_directory(size_bytes: int) -> Iterator[str]:
    """Yield a directory on a small tmpfs of its own, which no path of the machine leads to."""
    mount_fd = mount_detached("tmpfs", "none", {"size": str(size_bytes)}, (), 0)
    try:
        path = f"/proc/self/fd/{mount_fd}/pool"
        os.mkdir(path)
        yield path
    finally:
        os.close(mount_fd)
