"""Bad input: each refused by its own class in one line, and the source as it was before."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.core.errors import (
    FormatUnknown,
    SourceBlank,
    SourceBusy,
    SourceDamaged,
    SourceForeign,
    SourceFull,
    SourceMissing,
    ToolMissing,
    UsageError,
)
from kvfs.devices import (
    busy,
    destroy_source,
    open_source,
    probe,
    recognise,
    xfs_tools,
)
from tests.support.devices.loop import loop_device
from tests.support.devices.pools import (
    DRIVE_BYTES,
    MIB,
    Source,
    blank_source,
    format_source,
    refused,
    untouched,
)
from tests.support.mounts.mounting import workplace

KINDS = [
    pytest.param("block", marks=pytest.mark.needs_loop),
    pytest.param("image", marks=pytest.mark.needs_loop),
    "directory",
]


def rewrite_header(source: Source, change: Callable[[bytes], bytes]) -> None:
    with open_source(source.path) as device:
        path = Path(f"/proc/self/fd/{device.pool_fd}/POOL")
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("name", ["a\nb", "a\x1bb", "a\tb"])
def test_a_name_that_no_mount_takes_is_not_formatted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workplace() as place:
        (place / name).mkdir()
        monkeypatch.chdir(place / name)  # the mount makes it absolute
        for path in (place / name, place / name / "image", Path("image")):
            with refused(UsageError, repr(name)[1:-1], "contains a control character"):
                format_source(str(path), capacity_bytes=100 * MIB)
        assert list(place.rglob("*")) == [place / name]


# ---- foreign drives and images ----


def ext4(path: str) -> None:
    subprocess.run(["mkfs.ext4", "-q", "-L", "my data", path], check=True)


def xfs(path: str) -> None:
    subprocess.run(["mkfs.xfs", "-q", "-L", "scratch", path], check=True)


def swap(path: str) -> None:
    subprocess.run(["mkswap", "-q", path], check=True)


def first_bytes(path: str) -> None:
    write_at(path, 3 * MIB)


def last_bytes(path: str) -> None:
    write_at(path, DRIVE_BYTES - 100)


def write_at(path: str, offset_bytes: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, b"somebody's", offset_bytes)
    os.fsync(fd)
    os.close(fd)


def partitions(path: str) -> None:
    """One Linux partition from sector 2048 in an MBR."""
    row = bytes([0, 0, 2, 0, 0x83, 0, 2, 0]) + (2048).to_bytes(4, "little") + b"\0\0\1\0"
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, row + bytes(48) + b"\x55\xaa", 446)
    os.fsync(fd)
    os.close(fd)


@pytest.mark.needs_loop
@pytest.mark.parametrize("kind", ["block", "image"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (ext4, "ext4 file system, label my data"),
        (xfs, "xfs file system, label scratch"),
        (swap, "swap signature, no label"),
        (partitions, "dos partition table"),
        (first_bytes, "that blkid does not recognise"),
        (last_bytes, "that blkid does not recognise"),
    ],
)
def test_somebody_elses_data_is_named_and_kept(
    kind: str, make: Callable[[str], None], named: str
) -> None:
    with blank_source(kind) as source:
        make(source.path)
        with untouched(source):
            with refused(SourceForeign, source.path, named, "--force"):
                format_source(source.path)
            with refused(SourceForeign, source.path, named, "--force"):
                open_source(source.path)
            with refused(SourceForeign, source.path, named):
                destroy_source(source.path)
        format_source(source.path, force=True)
        open_source(source.path).close()


@pytest.mark.needs_loop
def test_contradicting_signatures_are_refused() -> None:
    with blank_source("block") as source:
        ext4(source.path)
        with open(source.path, "r+b") as drive:  # btrfs's magic, where ext4 keeps nothing
            drive.seek(0)
            drive.write(b"XFSB" + (4096).to_bytes(4, "big"))
            drive.flush()
            os.fsync(drive.fileno())
        with untouched(source), refused(SourceForeign, "--force"):
            format_source(source.path)


def test_what_blkid_tells_of_a_partition_is_not_its_content() -> None:
    place = "PART_ENTRY_SCHEME=gpt\nPART_ENTRY_UUID=1234\nPART_ENTRY_NUMBER=1\n"
    assert probe.read_blkid(f"DEVNAME=/dev/sda1\n{place}") is None
    found = probe.read_blkid(f"DEVNAME=/dev/sda1\nTYPE=LVM2_member\nUSAGE=raid\n{place}")
    assert found is not None
    assert found.text == "LVM2_member signature, no label"


# ---- pools that are not as they should be ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_named_and_kept(kind: str) -> None:
    with blank_source(kind) as source:
        header = format_source(source.path)
        with untouched(source), refused(SourceForeign, "kvfs pool", header.uuid, "--force"):
            format_source(source.path)


@pytest.mark.parametrize("kind", KINDS)
def test_another_format_version_is_refused(kind: str) -> None:
    def newer(raw: bytes) -> bytes:
        return json.dumps({**json.loads(raw), "format": 3}).encode()

    with blank_source(kind) as source:
        format_source(source.path)
        rewrite_header(source, newer)
        with untouched(source):
            for attempt in (open_source, destroy_source):
                with refused(FormatUnknown, source.path, "format 3", "format 1 and 2"):
                    attempt(source.path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 300,
        b"{}",
        b"[1]",
        b'{"format": 1}',
        b"[" * 3000,
        b'{"format": 1, "epoch": "x"}',
    ],
    ids=["empty", "zeros", "no fields", "a list", "one field", "deep", "wrong type"],
)
def test_a_garbage_header_is_refused(kind: str, raw: bytes) -> None:
    with blank_source(kind) as source:
        format_source(source.path)
        rewrite_header(source, lambda _: raw)
        with untouched(source), refused(SourceForeign, source.path, "POOL"):
            open_source(source.path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_without_a_header_is_refused(kind: str) -> None:
    with blank_source(kind) as source:
        format_source(source.path)
        with open_source(source.path) as device:
            os.unlink("POOL", dir_fd=device.pool_fd)
        with untouched(source):
            with refused(SourceForeign, source.path):
                open_source(source.path)
            with refused(SourceForeign, source.path, "--force"):
                format_source(source.path)
        format_source(source.path, force=True)
        open_source(source.path).close()


@pytest.mark.needs_loop
def test_an_xfs_that_cannot_be_mounted_is_damage() -> None:
    with blank_source("block") as source:
        format_source(source.path)
        with open(source.path, "r+b") as drive:  # sb_rootino, under the superblock's checksum
            drive.seek(56)
            drive.write(b"\xff" * 8)
            drive.flush()
            os.fsync(drive.fileno())
        with untouched(source), refused(SourceDamaged, source.path, "mounted"):
            open_source(source.path)
        destroy_source(source.path)
        with refused(SourceBlank, source.path, "kvfs mkfs"):
            open_source(source.path)


# ---- busy ----


@pytest.mark.needs_loop
def test_a_mounted_drive_is_refused_with_its_mountpoint() -> None:
    with blank_source("block") as source, workplace() as mountpoint:
        xfs(source.path)
        subprocess.run(["mount", source.path, str(mountpoint)], check=True)
        try:
            for force in (False, True):
                with refused(SourceBusy, source.path, f"mounted on {mountpoint}"):
                    format_source(source.path, force=force)
            with refused(SourceBusy, source.path, f"mounted on {mountpoint}"):
                open_source(source.path)
        finally:
            subprocess.run(["umount", str(mountpoint)], check=True)


@pytest.mark.needs_loop
def test_a_claimed_drive_is_refused() -> None:
    with blank_source("block") as source:
        fd = busy.claim(source.path)
        try:
            with untouched(source), refused(SourceBusy, source.path, "in use"):
                format_source(source.path, force=True)
        finally:
            os.close(fd)


@pytest.mark.needs_loop
def test_an_image_that_is_attached_elsewhere_is_refused() -> None:
    with (
        blank_source("image") as source,
        loop_device(0, backing=source.bytes_at) as drive,
        untouched(source),
        refused(SourceBusy, source.path, drive.path),
    ):
        format_source(source.path, force=True)


@pytest.mark.needs_loop
def test_a_drive_whose_file_is_another_drive_too_is_refused() -> None:
    with (
        blank_source("image") as source,
        loop_device(0, backing=source.bytes_at) as drive,
        loop_device(0, backing=source.bytes_at) as other,
        untouched(source),
        refused(SourceBusy, drive.path, other.path),
    ):
        format_source(drive.path, force=True)


# ---- missing, too small, full ----


def test_what_is_not_there_is_missing() -> None:
    with workplace() as place:
        gone = str(place / "gone")
        for attempt in (open_source, format_source, destroy_source, recognise):
            with refused(SourceMissing, gone):
                attempt(gone)
        with refused(SourceMissing, "no such device"):
            format_source("/dev/no-such-drive", capacity_bytes=DRIVE_BYTES)
        with refused(SourceMissing, "does not exist"):
            format_source(f"{gone}/image", capacity_bytes=DRIVE_BYTES)
        os.mkfifo(place / "pipe")
        for odd in ("/dev/null", str(place / "pipe")):
            with refused(SourceMissing, odd, "neither"):
                format_source(odd, force=True)
        assert os.listdir(place) == ["pipe"]


def test_too_small_an_image_is_refused_and_not_made() -> None:
    with workplace() as place:
        path = place / "image"
        with refused(SourceFull, str(path), "300 MiB"):
            format_source(str(path), size_bytes=299 * MIB)
        with refused(UsageError, str(path), "--capacity"):
            path.touch()
            format_source(str(path))
        path.unlink()
        with refused(SourceFull, str(path), "do not fit"):
            format_source(str(path), size_bytes=1 << 50)
        assert os.listdir(place) == []


def test_an_image_needs_a_name_of_its_own() -> None:
    with workplace() as place:
        for name, said in (
            (f"{place}/new/", "without a slash"),
            (f"{place}/new/.", "cannot be created: No such file"),
            (f"{place}/{'x' * 300}", "cannot be created: File name too long"),
            ("", "SOURCE is empty"),
        ):
            with refused(UsageError, said):
                format_source(name, capacity_bytes=100 * MIB)
        assert os.listdir(place) == []


def test_a_capacity_beyond_the_image_is_refused() -> None:
    with (
        blank_source("image") as source,
        untouched(source),
        refused(UsageError, source.path, "at most"),
    ):
        format_source(source.path, capacity_bytes=DRIVE_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capacity_of_no_use_is_refused(kind: str) -> None:
    with blank_source(kind) as source, untouched(source):
        for capacity_bytes in (1, MIB - 1):
            with refused(UsageError, source.path, "a pool needs 1 MiB"):
                format_source(source.path, capacity_bytes=capacity_bytes)
    with workplace() as place:
        with refused(UsageError, "a pool needs 1 MiB"):
            format_source(str(place / "image"), capacity_bytes=1)
        assert os.listdir(place) == []


# ---- tools ----


@pytest.mark.parametrize(("tool", "package"), [("blkid", "util-linux"), ("mkfs.xfs", "xfsprogs")])
def test_a_missing_program_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tool: str, package: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(xfs_tools, "_SBIN", "/nowhere")
    with refused(ToolMissing, tool, f"apt install {package}"):
        xfs_tools.find_tool(tool)


def test_without_blkid_nothing_is_judged_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with blank_source("image") as source, untouched(source):
        monkeypatch.setattr(xfs_tools, "_SBIN", "/nowhere")
        monkeypatch.setenv("PATH", "/nowhere")
        with refused(ToolMissing, "blkid"):
            format_source(source.path, force=True)
        with refused(ToolMissing, "blkid"):
            open_source(source.path)


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xfs_tools, "find_tool", lambda _: "/bin/sleep")
    with refused(SourceDamaged, "did not finish"):
        xfs_tools.run_tool("blkid", "60", timeout_s=0.05)


def test_a_blank_source_is_told_from_a_foreign_one() -> None:
    with blank_source("image") as source, untouched(source):
        with refused(SourceBlank, source.path):
            open_source(source.path)
        with refused(SourceBlank, source.path):
            destroy_source(source.path)
