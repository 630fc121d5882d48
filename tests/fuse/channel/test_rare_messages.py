"""Calls that become rare FUSE messages, or that the kernel makes of others: all answered."""

import contextlib
import fcntl
import mmap
import os
import random
import struct
import subprocess
import termios
from collections.abc import Callable
from errno import EBADF, EINVAL, ENODEV, ENOTTY, EOPNOTSUPP, EXDEV
from pathlib import Path
from typing import Final

import pytest

from tests.support.kernel.calls import (
    FALLOC_COLLAPSE_RANGE,
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    fallocate,
    opened,
    read_file,
    refused,
    tolerated,
    write_file,
)
from tests.support.mounts.mounting import Mounted, Reference, workplace

MIB: Final = 1 << 20
PAGE: Final = 4096
# linux/falloc.h and linux/fs.h.
FALLOC_INSERT_RANGE: Final = 0x20
FALLOC_UNSHARE_RANGE: Final = 0x40
FS_IOC_GETFLAGS: Final = 0x80086601
FICLONE: Final = 0x40049409
FIEMAP: Final = 0xC020660B


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes without repetition that the seed tells apart."""
    return random.Random(seed).randbytes(size_bytes)


def test_fallocate_extends(kv: Path) -> None:
    """[fallocate] Mode 0 sets the size, new bytes are zero, old ones stay."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"content")
        fallocate(fd, 0, 0, MIB)
        assert os.fstat(fd).st_size == MIB
        assert os.fstat(fd).st_blocks * 512 >= MIB
        fallocate(fd, 0, 0, 10)
        assert os.fstat(fd).st_size == MIB
    assert read_file(kv / "file") == b"content" + bytes(MIB - 7)


def test_fallocate_keeps_the_size(kv: Path) -> None:
    """[fallocate] KEEP_SIZE reserves behind the end; writes then fill it."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"content")
        fallocate(fd, FALLOC_KEEP_SIZE, 0, MIB)
        assert os.fstat(fd).st_size == 7
        assert os.fstat(fd).st_blocks * 512 >= MIB
        os.pwrite(fd, b"more", 7)
    assert read_file(kv / "file") == b"contentmore"


def test_punched_holes_are_zero(kv: Path) -> None:
    """[fallocate] PUNCH_HOLE leaves zeros and the size; mapped and cached bytes change too."""
    data = pattern(MIB)
    write_file(kv / "file", data)
    mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE
    with (
        opened(kv / "file", os.O_RDWR) as fd,
        contextlib.closing(mmap.mmap(fd, MIB)) as memory,
    ):
        assert memory[:] == data
        held = os.fstat(fd).st_blocks
        fallocate(fd, mode, 10_000, 100_000)
        assert os.fstat(fd).st_blocks < held
        expected = data[:10_000] + bytes(100_000) + data[110_000:]
        assert os.pread(fd, MIB, 0) == memory[:] == expected
    assert read_file(kv / "file") == expected


def test_zeroed_ranges_are_zero(kv: Path) -> None:
    """[fallocate-modes] ZERO_RANGE leaves zeros or is EOPNOTSUPP; never anything between."""
    data = pattern(100_000)
    write_file(kv / "file", data)
    expected = data
    with opened(kv / "file", os.O_RDWR) as fd:
        with contextlib.suppress(OSError):
            fallocate(fd, FALLOC_ZERO_RANGE, 5_000, 50_000)
            expected = data[:5_000] + bytes(50_000) + data[55_000:]
        assert os.pread(fd, 200_000, 0) == expected


@pytest.mark.usefixtures("kvfs_only")
@pytest.mark.parametrize("mode", [FALLOC_COLLAPSE_RANGE, FALLOC_INSERT_RANGE, FALLOC_UNSHARE_RANGE])
def test_ranges_that_move_bytes_are_refused(kv: Path, mode: int) -> None:
    """[fallocate-modes] EOPNOTSUPP, again and again, and the content stays."""
    data = pattern(4 * PAGE)
    write_file(kv / "file", data)
    with opened(kv / "file", os.O_RDWR) as fd:
        for _ in range(2):
            with refused(EOPNOTSUPP):
                fallocate(fd, mode, PAGE, PAGE)
    assert read_file(kv / "file") == data


def test_bad_fallocate_arguments(kv: Path) -> None:
    """[fallocate] The kernel's own checks."""
    write_file(kv / "file", b"content")
    with opened(kv / "file", os.O_RDWR) as fd:
        with refused(EINVAL):
            fallocate(fd, 0, 0, 0)
        with refused(EINVAL):
            fallocate(fd, 0, -1, 10)
    with opened(kv / "file", os.O_RDONLY) as fd, refused(EBADF):
        fallocate(fd, 0, 0, 10)
    assert read_file(kv / "file") == b"content"


def test_posix_fallocate_always_works(kv: Path) -> None:
    """[fallocate] Sizes of any length, in files with bytes; those stay."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"content")
        os.posix_fallocate(fd, 0, 3 * MIB + 5)
        assert os.fstat(fd).st_size == 3 * MIB + 5
    assert read_file(kv / "file") == b"content" + bytes(3 * MIB - 2)


@pytest.mark.parametrize("advice", range(6))
def test_advice_changes_nothing(kv: Path, advice: int) -> None:
    """[fadvise] Every advice from NORMAL to NOREUSE, on cold and dirty files; also readahead."""
    data = pattern(3 * MIB + 7)
    write_file(kv / "file", data)
    with opened(kv / "file", os.O_RDWR) as fd:
        os.posix_fadvise(fd, 0, 0, advice)
        assert os.pread(fd, len(data) + 1, 0) == data
        os.pwrite(fd, b"dirty", 100)
        os.posix_fadvise(fd, 50, MIB, advice)
        assert os.pread(fd, 5, 100) == b"dirty"
    assert read_file(kv / "file") == data[:100] + b"dirty" + data[105:]


def test_wanting_all_then_reading(kv: Path, mounted: Mounted | Reference) -> None:
    """[fadvise] WILLNEED ahead of the reads of a whole cold file, as loaders do."""
    data = pattern(8 * MIB)
    write_file(kv / "file", data)
    mounted.remount()
    with opened(kv / "file", os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        assert os.pread(fd, 1000, 5 * MIB) == data[5 * MIB : 5 * MIB + 1000]
        assert os.pread(fd, 9 * MIB, 0) == data


def copied_by_range(source: int, target: int, size: int) -> None:
    """Copy with copy_file_range(2)."""
    while size:
        done = os.copy_file_range(source, target, size)
        assert done > 0
        size -= done


def copied_by_sendfile(source: int, target: int, size: int) -> None:
    """Copy with sendfile(2)."""
    at = 0
    while at < size:
        done = os.sendfile(target, source, at, size - at)
        assert done > 0
        at += done


def copied_by_splice(source: int, target: int, size: int) -> None:
    """Copy with splice(2) through a pipe."""
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb"):
        while size:
            held = os.splice(source, writer, min(size, 65536))
            assert held > 0
            size -= held
            while held:
                held -= os.splice(reader, target, held)


@pytest.mark.parametrize("copy", [copied_by_range, copied_by_sendfile, copied_by_splice])
@pytest.mark.parametrize("way", ["within", "out", "in"])
def test_the_kernel_copies(kv: Path, copy: Callable[[int, int, int], None], way: str) -> None:
    """[copy-range] 5 MiB and some by each call, within the mount, from it and to it."""
    data = pattern(5 * MIB + 123)
    with workplace() as outside:
        source = (outside if way == "in" else kv) / "source"
        target = (outside if way == "out" else kv) / "target"
        write_file(source, data)
        with (
            opened(source, os.O_RDONLY) as read,
            opened(target, os.O_CREAT | os.O_WRONLY) as write,
        ):
            # Between different file systems copy_file_range may refuse; cp then reads.
            may_refuse = copy is copied_by_range and way != "within"
            with tolerated(*((EXDEV, EOPNOTSUPP, EINVAL) if may_refuse else ())):
                copy(read, write, len(data))
                assert read_file(target) == data
                return
            assert os.fstat(write).st_size == 0
            copied_by_sendfile(read, write, len(data))
        assert read_file(target) == data


def test_ranges_within_one_file(kv: Path) -> None:
    """[copy-range] Given offsets, and the descriptor's own position does not move."""
    data = pattern(100_000)
    write_file(kv / "file", data)
    with opened(kv / "file", os.O_RDWR) as fd:
        assert os.copy_file_range(fd, fd, 10_000, 5_000, 60_001) == 10_000
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    assert read_file(kv / "file") == data[:60_001] + data[5_000:15_000] + data[70_001:]


def test_splicing_after_a_write_by_another(kv: Path) -> None:
    """[copy-range] What is spliced is what was written last, no older page cache."""
    write_file(kv / "file", b"old" * 10_000)
    reader, writer = os.pipe()
    with (
        open(reader, "rb", buffering=0) as pipe,
        open(writer, "wb", buffering=0),
        opened(kv / "file", os.O_RDONLY) as one,
        opened(kv / "file", os.O_WRONLY) as two,
    ):
        assert os.pread(one, 3, 0) == b"old"
        os.pwrite(two, b"new", 0)
        assert os.splice(one, writer, 6) == 6
        assert pipe.read(6) == b"newold"


def test_cp_in_every_mode(kv: Path) -> None:
    """[copy-range] cp with its own tricks: reflink=auto, sparse=always, and install."""
    data = pattern(MIB) + bytes(3 * MIB) + pattern(MIB, 1)
    write_file(kv / "source", data)
    for number, flags in enumerate((["--reflink=auto"], ["--sparse=always"], ["-a"])):
        subprocess.run(["cp", *flags, kv / "source", kv / f"copy{number}"], check=True)
        assert read_file(kv / f"copy{number}") == data
    subprocess.run(["install", kv / "source", kv / "installed"], check=True)
    assert read_file(kv / "installed") == data


@pytest.mark.usefixtures("kvfs_only")
def test_there_are_no_clones(kv: Path) -> None:
    """[copy-range] FICLONE is refused as on any file system without reflinks."""
    write_file(kv / "source", b"content")
    with (
        opened(kv / "source", os.O_RDONLY) as source,
        opened(kv / "target", os.O_CREAT | os.O_WRONLY) as target,
        refused(EOPNOTSUPP, ENOTTY, EINVAL),
    ):
        fcntl.ioctl(target, FICLONE, source)


@pytest.mark.usefixtures("kvfs_only")
def test_ioctls_are_answered(kv: Path) -> None:
    """[ioctl] ENOTTY for terminals', flags' and extents' questions, files and directories."""
    write_file(kv / "file", b"content")
    for path in (kv / "file", kv):
        with opened(path, os.O_RDONLY) as fd:
            for request in (termios.TCGETS, FS_IOC_GETFLAGS, FIEMAP, 0x1234):
                with refused(ENOTTY, EOPNOTSUPP, ENODEV):
                    fcntl.ioctl(fd, request, bytes(64))
    with open(kv / "file") as file:
        assert not file.isatty()
        assert file.read() == "content"


def test_counting_what_is_left(kv: Path) -> None:
    """[ioctl] FIONREAD is the kernel's own and counts what is left to read."""
    write_file(kv / "file", b"content")
    with opened(kv / "file", os.O_RDONLY) as fd:
        os.read(fd, 3)
        (left,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
        assert left == 4
