"""Reading and writing bytes."""

import os
import random
import resource
import subprocess
import sys
import tempfile
from errno import EBADF, EFBIG, EINVAL, EISDIR, ENXIO
from pathlib import Path

import pytest

from tests.support.kernel.calls import opened, read_file, refused, write_file
from tests.support.mounts.mounting import Mounted, Reference

MIB = 1 << 20
SIZES = [0, 1, 511, 4095, 4096, 4097, 65536, 131071, 131073, MIB, MIB + 1, 5_777_777]


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes without repetition that the seed tells apart."""
    return random.Random(seed).randbytes(size_bytes)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_read(kv: Path, size: int) -> None:
    """[write] One write, read back in one go and in odd parts."""
    data = pattern(size)
    write_file(kv / "file", data)
    assert os.stat(kv / "file").st_size == size
    assert read_file(kv / "file") == data
    with opened(kv / "file", os.O_RDONLY) as fd:
        for at in range(0, size, max(1, size // 7)):
            assert os.pread(fd, 10_007, at) == data[at : at + 10_007]


def test_reads_end_at_the_end(kv: Path) -> None:
    """[read] Short at the end, empty behind it, vectors filled in order."""
    data = pattern(10_000)
    write_file(kv / "file", data)
    with opened(kv / "file", os.O_RDONLY) as fd:
        assert os.pread(fd, 100, 9_990) == data[9_990:]
        for at in (10_000, 10_001, 1 << 40, (1 << 63) - 4097):
            assert os.pread(fd, 100, at) == b""
        with refused(EINVAL):
            os.pread(fd, 10, -1)
        parts = [bytearray(3), bytearray(0), bytearray(5_000), bytearray(9_000)]
        assert os.preadv(fd, parts, 7) == 9_993
        assert b"".join(parts)[:9_993] == data[7:]
        assert os.read(fd, 4) + os.read(fd, 4) == data[:8]
        assert os.lseek(fd, -3, os.SEEK_END) == 9_997
        assert os.read(fd, 100) == data[-3:]
    with opened(kv, os.O_RDONLY) as fd, refused(EISDIR):
        os.read(fd, 1)


def test_writes_in_any_order(kv: Path) -> None:
    """[write] Random pieces by several descriptors make the same file as in memory."""
    chance = random.Random(7)
    model = bytearray()
    with (
        opened(kv / "file", os.O_CREAT | os.O_RDWR) as one,
        opened(kv / "file", os.O_RDWR) as two,
        opened(kv / "file", os.O_RDONLY) as reader,
    ):
        for step in range(150):
            at, size = chance.randrange(300_000), chance.randrange(1, 40_000)
            data = pattern(size, step)
            model.extend(bytes(max(0, at + size - len(model))))
            model[at : at + size] = data
            assert os.pwrite(chance.choice((one, two)), data, at) == size
            assert os.pread(reader, size + 10, at) == bytes(model[at : at + size + 10])
            assert os.fstat(reader).st_size == len(model)
    assert read_file(kv / "file") == bytes(model)


def test_a_vector_is_written_whole(kv: Path) -> None:
    """[write] 17 parts and 33 MB at an unaligned offset, as Mooncake does."""
    parts = [pattern(size, size) for size in [1, 2_000_003] * 8 + [17_000_001]]
    total = sum(map(len, parts))
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        assert os.pwritev(fd, parts, 4321) == total
    assert read_file(kv / "file") == bytes(4321) + b"".join(parts)


def test_unwritten_bytes_are_zero(kv: Path) -> None:
    """[zero-fill] After a far write, truncates up, and down and up again; never old bytes."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"\xff" * 10_000)
        os.ftruncate(fd, 5)
        os.ftruncate(fd, 20_000)
        assert os.pread(fd, 30_000, 0) == b"\xff" * 5 + bytes(19_995)
        os.pwrite(fd, b"\xee" * 100, 50_000)
        assert os.pread(fd, 60_000, 5) == bytes(49_995) + b"\xee" * 100
        os.ftruncate(fd, 50_050)
        os.pwrite(fd, b"\xdd", 60_000)
        assert os.pread(fd, 20_000, 50_000) == b"\xee" * 50 + bytes(9_950) + b"\xdd"
        os.ftruncate(fd, 0)
        os.ftruncate(fd, 60_001)
        assert os.pread(fd, 70_000, 0) == bytes(60_001)
    assert read_file(kv / "file") == bytes(60_001)


def test_zeros_hold_for_other_readers_and_after_a_remount(
    kv: Path, mounted: Mounted | Reference
) -> None:
    """[zero-fill] The zeros are stored, not only seen in the page cache."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"\xff" * 4096)
        os.ftruncate(fd, 100)
        os.pwrite(fd, b"end", 9_000)
    mounted.remount()
    assert read_file(kv / "file") == b"\xff" * 100 + bytes(8_900) + b"end"


def test_holes_cost_nothing(kv: Path) -> None:
    """[sparse] A byte a gigabyte out costs no gigabyte, an empty file nothing."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"x", 1 << 30)
        os.pwrite(fd, b"y", 1 << 31)
    info = os.stat(kv / "file")
    assert info.st_size == (1 << 31) + 1
    assert 0 < info.st_blocks * 512 <= 64 * MIB
    with opened(kv / "file", os.O_RDONLY) as fd:
        assert os.pread(fd, 3, (1 << 30) - 1) == b"\0x\0"
        assert os.pread(fd, MIB, 5 << 20) == bytes(MIB)
    write_file(kv / "empty", b"")
    assert os.stat(kv / "empty").st_blocks == 0


def test_blocks_count_what_is_held(kv: Path) -> None:
    """[sparse] A closed file holds its size, rounded up to a block, and no reserve."""
    for size in (1, 4096, 100_001, 3 * MIB):
        write_file(kv / "file", pattern(size))
        held = os.stat(kv / "file").st_blocks * 512
        assert size <= held <= -(-size // 4096) * 4096 + 4096


def test_truncate(kv: Path) -> None:
    """[truncate] Exact sizes by path and descriptor, times, and the refusals."""
    data = pattern(10_000)
    write_file(kv / "file", data)
    before = os.stat(kv / "file")
    os.truncate(kv / "file", 7_001)
    after = os.stat(kv / "file")
    assert (after.st_size, read_file(kv / "file")) == (7_001, data[:7_001])
    assert after.st_mtime_ns > before.st_mtime_ns
    assert after.st_ctime_ns > before.st_ctime_ns
    with opened(kv / "file", os.O_RDWR) as fd:
        os.ftruncate(fd, 7_002)
        assert os.pread(fd, 10, 6_999) == data[6_999:7_001] + b"\0"
        with refused(EINVAL):
            os.ftruncate(fd, -1)
    with opened(kv / "file", os.O_RDONLY) as fd, refused(EINVAL, EBADF):
        os.ftruncate(fd, 0)
    with refused(EINVAL):
        os.truncate(kv / "file", -1)
    with refused(EISDIR):
        os.truncate(kv, 0)
    assert os.stat(kv / "file").st_size == 7_002


def backing_holds(mounted: Mounted | Reference, size_bytes: int) -> bool:
    """Tell whether what lies under the mount holds files of that size (ext4: to 16 TiB)."""
    if isinstance(mounted, Reference) or not os.path.isdir(mounted.source):
        return True
    with tempfile.TemporaryFile(dir=Path(mounted.source).parent) as file:
        try:
            file.truncate(size_bytes)
        except OSError:
            return False
    return True


@pytest.mark.parametrize("size", [1 << 40, 1 << 50])
def test_a_huge_truncate_costs_nothing(kv: Path, size: int, mounted: Mounted | Reference) -> None:
    """[truncate-huge] No blocks, no capacity; the far end can be written and read."""
    if not backing_holds(mounted, size):
        pytest.skip("the backing file system holds no file of this size")
    free = os.statvfs(kv).f_bavail
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, size)
        assert os.fstat(fd).st_size == size
        assert os.fstat(fd).st_blocks <= 64
        assert os.pread(fd, 10, size - 5) == bytes(5)
        os.pwrite(fd, b"far end", size - 7)
        assert os.pread(fd, 100, size - 7) == b"far end"
        os.ftruncate(fd, 3)
        assert os.pread(fd, 100, 0) == bytes(3)
    assert abs(os.statvfs(kv).f_bavail - free) * 4096 < 64 * MIB


def test_beyond_the_largest_file(kv: Path) -> None:
    """[size-bounds] EFBIG (or EINVAL from the kernel's own checks), and nothing changes."""
    largest = (1 << 63) - 1
    write_file(kv / "file", b"content")
    with opened(kv / "file", os.O_RDWR) as fd:
        for call in (
            lambda: os.pwrite(fd, b"xy", largest),
            lambda: os.pwrite(fd, b"x" * 8192, largest),
        ):
            with refused(EFBIG, EINVAL):
                call()
        assert os.pread(fd, 100, largest - 200) == b""
    assert read_file(kv / "file") == b"content"


@pytest.mark.parametrize("size", [(1 << 63) - 1, (1 << 63) - 4096, 1 << 62])
def test_the_largest_truncate(kv: Path, size: int) -> None:
    """[size-bounds] Exactly that size, or EFBIG and the old one; the file goes on working."""
    write_file(kv / "file", b"content")
    try:
        os.truncate(kv / "file", size)
        reached = size
    except OSError as error:
        if error.errno != EFBIG:
            raise
        reached = 7
    assert os.stat(kv / "file").st_size == reached
    os.truncate(kv / "file", 3)
    assert read_file(kv / "file") == b"con"


def test_the_size_limit_of_a_process(kv: Path) -> None:
    """[size-bounds] RLIMIT_FSIZE is the kernel's business and works: EFBIG beyond it."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)\n"
        "assert os.pwrite(fd, b'x' * 2000, 0) == 1000\n"
        "try: os.pwrite(fd, b'x', 5000)\n"
        "except OSError as error: sys.exit(error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(kv / "file")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        check=False,
    )
    assert done.returncode == EFBIG
    assert os.stat(kv / "file").st_size == 1000


def test_seeking_data_and_holes(kv: Path) -> None:
    """[seek-hole] Data is never called a hole, ranges cover the file, ENXIO behind it."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        for at in (0, 2 * MIB, 5 * MIB):
            os.pwrite(fd, b"\xaa" * 70_000, at)
        size = 8 * MIB
        os.ftruncate(fd, size)
        found, at = set(), 0
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(fd, start, os.SEEK_HOLE)
            assert at <= start < end <= size
            found.update(range(start // 4096, -(-end // 4096)))
            at = end
        for start in (0, 2 * MIB, 5 * MIB):
            assert found >= set(range(start // 4096, (start + 70_000) // 4096))
        assert os.lseek(fd, size - 1, os.SEEK_HOLE) in (size - 1, size)
        for whence in (os.SEEK_DATA, os.SEEK_HOLE):
            with refused(ENXIO):
                os.lseek(fd, size, whence)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR], ids=["read", "written"])
def test_seeking_from_nowhere(kv: Path, flags: int) -> None:
    """[seek-hole] ENXIO at the end, behind it, and before the beginning."""
    write_file(kv / "file", pattern(9_000))
    with opened(kv / "file", flags) as fd:
        for at in (9_000, 1 << 40, -1, -(1 << 63)):
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                with refused(ENXIO):
                    os.lseek(fd, at, whence)


def test_sync_calls_return(kv: Path) -> None:
    """[fsync] Every way to ask for durability succeeds, on files and on directories."""
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"content")
        for _ in range(2):
            os.fsync(fd)
            os.fdatasync(fd)
    with opened(kv, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
    os.sync()
    for flag in (os.O_SYNC, os.O_DSYNC):
        with opened(kv / "file", os.O_WRONLY | flag) as fd:
            os.write(fd, b"CON")
    assert read_file(kv / "file") == b"CONtent"


def test_synchronous_writes(kv: Path) -> None:
    """[sync-flags] O_SYNC and O_DSYNC descriptors take every write, large ones too."""
    data = pattern(3 * MIB)
    for flag in (os.O_SYNC, os.O_DSYNC):
        with opened(kv / "file", os.O_CREAT | os.O_RDWR | os.O_TRUNC | flag) as fd:
            for at in range(0, len(data), 700_000):
                assert os.pwrite(fd, data[at : at + 700_000], at) > 0
            assert os.pread(fd, len(data), 0) == data
