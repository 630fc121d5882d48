"""O_DIRECT: aligned, unaligned, switched on late, and beside buffered descriptors."""

import fcntl
import mmap
import os
import random
import subprocess
from collections.abc import Callable
from errno import EINVAL
from pathlib import Path

import pytest

from tests.support.kernel.calls import opened, read_file, write_file
from tests.support.mounts.mounting import Mounted

PAGE = 4096
MIB = 1 << 20


def aligned(data: bytes) -> mmap.mmap:
    """Return the bytes in memory aligned to a page; the caller closes it."""
    memory = mmap.mmap(-1, max(len(data), PAGE))
    memory[: len(data)] = data
    return memory


@pytest.mark.parametrize("size", [PAGE, 64 * 1024, MIB, 32 * MIB])
def test_aligned_direct_io(kv: Path, size: int) -> None:
    """[direct-aligned] Written directly, read directly and buffered, on one descriptor or two."""
    data = random.Random(size).randbytes(size)
    with (
        aligned(data) as memory,
        aligned(bytes(size)) as back,
        opened(kv / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd,
    ):
        assert os.pwrite(fd, memory, 0) == size
        assert os.preadv(fd, [back], 0) == size
        assert back[:size] == data
    assert read_file(kv / "file") == data


def test_direct_and_buffered_see_each_other(kv: Path) -> None:
    """[direct-aligned] Both ways, at once, on one file."""
    write_file(kv / "file", b"a" * (4 * PAGE))
    with (
        opened(kv / "file", os.O_RDWR) as buffered,
        opened(kv / "file", os.O_RDWR | os.O_DIRECT) as direct,
        aligned(b"d" * PAGE) as block,
        aligned(bytes(PAGE)) as back,
    ):
        assert os.pread(buffered, PAGE, PAGE) == b"a" * PAGE
        assert os.pwrite(direct, block, PAGE) == PAGE
        assert os.pread(buffered, PAGE, PAGE) == b"d" * PAGE
        assert os.pwrite(buffered, b"b" * PAGE, 2 * PAGE) == PAGE
        assert os.preadv(direct, [back], 2 * PAGE) == PAGE
        assert back[:] == b"b" * PAGE
    assert read_file(kv / "file") == b"".join(c * PAGE for c in (b"a", b"d", b"b", b"a"))


def test_a_direct_read_meets_an_unaligned_end(kv: Path) -> None:
    """[direct-aligned] The last, short part comes back short, as on XFS."""
    data = random.Random(1).randbytes(10_001)
    write_file(kv / "file", data)
    with (
        opened(kv / "file", os.O_RDONLY | os.O_DIRECT) as fd,
        aligned(bytes(4 * PAGE)) as back,
    ):
        assert os.preadv(fd, [back], 0) == 10_001
        assert back[:10_001] == data
        assert os.preadv(fd, [back], 2 * PAGE) == 10_001 - 2 * PAGE
        assert os.preadv(fd, [back], 4 * PAGE) == 0


def test_a_direct_write_then_truncate_to_the_true_size(kv: Path) -> None:
    """[direct-aligned] How connectors store odd sizes: padded write, then ftruncate."""
    data = random.Random(2).randbytes(100_001)
    padded = -(-len(data) // PAGE) * PAGE
    with (
        aligned(data + bytes(padded - len(data))) as memory,
        opened(kv / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd,
    ):
        assert os.write(fd, memory) == padded
        os.ftruncate(fd, len(data))
        assert os.fstat(fd).st_size == len(data)
    assert read_file(kv / "file") == data


def unless_invalid(call: Callable[[], int]) -> int:
    """Return what the call returns, or 0 when it is refused with EINVAL."""
    try:
        return call()
    except OSError as error:
        if error.errno != EINVAL:
            raise
        return 0


@pytest.mark.parametrize(
    ("offset", "size", "shift"),
    [(1, PAGE, 0), (0, 100, 0), (0, PAGE, 1), (512, 512, 0), (3, 5, 7), (PAGE - 1, 3 * PAGE, 9)],
)
def test_unaligned_direct_io_works_or_is_refused(
    kv: Path, offset: int, size: int, shift: int
) -> None:
    """[direct-unaligned] EINVAL or the right bytes, and the file system lives on."""
    old = random.Random(3).randbytes(8 * PAGE)
    write_file(kv / "file", old)
    data = random.Random(4).randbytes(size)
    expected = bytearray(old)
    with (
        opened(kv / "file", os.O_RDWR | os.O_DIRECT) as fd,
        aligned(bytes(shift) + data) as memory,
        memoryview(memory) as whole,
        whole[shift : shift + size] as part,
    ):
        written = unless_invalid(lambda: os.pwritev(fd, [part], offset))
        expected[offset : offset + written] = data[:written]
        got = unless_invalid(lambda: os.preadv(fd, [part], offset))
        assert part[:got] == expected[offset : offset + got]
    assert read_file(kv / "file") == bytes(expected)
    write_file(kv / "alive", b"yes")


def test_unaligned_direct_io_works_on_the_daemon_path(kv: Path, mount: Mounted) -> None:
    """[direct-unaligned] There O_DIRECT asks for nothing that alignment could spoil."""
    if mount.status()["data_path"] != "daemon":
        pytest.skip("promised for the daemon path only")
    with opened(kv / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
        assert os.write(fd, b"unaligned") == 9
        assert os.pread(fd, 100, 2) == b"aligned"
    assert read_file(kv / "file") == b"unaligned"


def test_dd_with_an_odd_end(mount: Mounted, kv: Path) -> None:
    """[direct-toggle] It clears O_DIRECT before its last write: whole, or refused there."""
    data = random.Random(1).randbytes(3 * PAGE + 100)
    write_file(kv / "from", data)
    words = ["dd", f"if={kv / 'from'}", f"of={kv / 'to'}", f"bs={PAGE}", "oflag=direct"]
    copied = subprocess.run(words, capture_output=True, text=True, env={"LC_ALL": "C"})
    if copied.returncode == 0:
        assert read_file(kv / "to") == data
        return
    assert mount.status()["data_path"] == "passthrough"
    assert "Invalid argument" in copied.stderr
    assert read_file(kv / "to") == data[: 3 * PAGE]


def test_direct_switched_on_and_off(kv: Path) -> None:
    """[direct-toggle] As NIXL and KVBM do it: F_SETFL, aligned I/O, F_SETFL again."""
    write_file(kv / "file", b"a" * (2 * PAGE))
    with (
        opened(kv / "file", os.O_RDWR) as fd,
        aligned(b"b" * PAGE) as block,
        aligned(bytes(PAGE)) as back,
    ):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        assert os.pwrite(fd, block, PAGE) == PAGE
        assert os.preadv(fd, [back], PAGE) == PAGE
        assert back[:] == b"b" * PAGE
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        assert os.pwrite(fd, b"odd", 1) == 3
    assert read_file(kv / "file") == b"aodd" + b"a" * (PAGE - 4) + b"b" * PAGE
