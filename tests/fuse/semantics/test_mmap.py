"""Memory mappings."""

import contextlib
import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from errno import ENXIO
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.kernel.calls import opened, read_file, refused, write_file
from tests.support.mounts.mounting import Mounted, Reference

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@contextlib.contextmanager
def mapping(fd: int, size_bytes: int) -> Iterator[int]:
    """Yield the address of a shared mapping that, unlike mmap.mmap, holds no descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
    try:
        yield address
    finally:
        assert libc.munmap(address, size_bytes) == 0


def test_a_shared_mapping_and_writes_see_each_other(kv: Path) -> None:
    """[mmap] What is stored in memory is read, what is written appears in memory."""
    write_file(kv / "file", b"a" * (3 * PAGE))
    with (
        opened(kv / "file", os.O_RDWR) as fd,
        Caller() as elsewhere,
        contextlib.closing(mmap.mmap(fd, 3 * PAGE)) as memory,
    ):
        remote = elsewhere.os("open", str(kv / "file"), os.O_RDWR)
        memory[PAGE : PAGE + 5] = b"store"
        assert os.pread(fd, 5, PAGE) == b"store"
        assert elsewhere.os("pread", remote, 5, PAGE) == b"store"
        elsewhere.os("pwrite", remote, b"write", 2 * PAGE - 2)
        assert memory[2 * PAGE - 2 : 2 * PAGE + 3] == b"write"
        memory.flush()
        elsewhere.os("close", remote)
    assert read_file(kv / "file")[PAGE : PAGE + 5] == b"store"


def test_a_private_mapping_changes_nothing(kv: Path) -> None:
    """[mmap] Copy on write stays in the process."""
    data = random.Random(1).randbytes(5 * PAGE)
    write_file(kv / "file", data)
    with (
        opened(kv / "file", os.O_RDONLY) as fd,
        contextlib.closing(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)) as memory,
    ):
        assert memory[:] == data
        memory[:6] = b"forged"
        assert memory[:8] == b"forged" + data[6:8]
    assert read_file(kv / "file") == data


def test_a_file_filled_through_memory(kv: Path, mounted: Mounted | Reference) -> None:
    """[mmap] ftruncate, map, store, unmap, close: the bytes are in the file for good."""
    data = random.Random(2).randbytes(8 * MIB + 17)
    with opened(kv / "file", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, len(data))
        with contextlib.closing(mmap.mmap(fd, len(data))) as memory:
            memory[:] = data
    assert read_file(kv / "file") == data
    mounted.remount()
    assert read_file(kv / "file") == data


def test_a_mapping_outlives_descriptor_and_name(kv: Path) -> None:
    """[mmap] Readable and writable after close, after unlink, after the name has a new file."""
    write_file(kv / "file", b"old" * PAGE)
    with (
        opened(kv / "file", os.O_RDWR) as fd,
        contextlib.closing(mmap.mmap(fd, 3 * PAGE)) as memory,
        contextlib.closing(mmap.mmap(fd, 3 * PAGE)) as second,
    ):
        os.unlink(kv / "file")
        write_file(kv / "file", b"new" * PAGE)
        memory[:3] = b"OLD"
        memory.flush()
        assert second[:6] == b"OLDold"
    assert read_file(kv / "file") == b"new" * PAGE


def test_a_mapping_of_a_closed_descriptor_is_stored(kv: Path) -> None:
    """[mmap] What was stored after the close is in the file after the unmap."""
    write_file(kv / "file", bytes(PAGE))
    with opened(kv / "file", os.O_RDWR) as fd:
        memory = mmap.mmap(fd, PAGE)
    memory[:4] = b"late"
    memory.flush()
    memory.close()
    assert read_file(kv / "file")[:4] == b"late"


def test_a_mapping_of_a_direct_descriptor(kv: Path) -> None:
    """[mmap] O_DIRECT does not stand in its way."""
    data = random.Random(3).randbytes(4 * PAGE)
    write_file(kv / "file", data)
    with (
        opened(kv / "file", os.O_RDWR | os.O_DIRECT) as fd,
        contextlib.closing(mmap.mmap(fd, 0)) as memory,
    ):
        assert memory[:] == data
        memory[:4] = b"mark"
        memory.flush()
    assert read_file(kv / "file") == b"mark" + data[4:]


def test_memory_behind_the_end_is_zero_and_not_stored(kv: Path) -> None:
    """[mmap-end] The rest of the last memory page reads as zeros and stays out of the file."""
    write_file(kv / "file", b"x" * 100)
    with (
        opened(kv / "file", os.O_RDWR) as fd,
        contextlib.closing(mmap.mmap(fd, 100)) as memory,
    ):
        memory[99:100] = b"y"
        memory.flush()
        os.ftruncate(fd, 200)
        assert os.pread(fd, 1000, 0) == b"x" * 99 + b"y" + bytes(100)
    assert os.stat(kv / "file").st_size == 200


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_what_is_stored_in_memory_is_data(kv: Path, *, closed: bool) -> None:
    """[seek-hole] Bytes that only the kernel has are in no hole, also behind the descriptor."""
    with Caller() as elsewhere, contextlib.ExitStack() as until_closed:
        # Who is started later flushes the descriptor, and with it what was stored.
        fd = until_closed.enter_context(opened(kv / "file", os.O_CREAT | os.O_RDWR))
        os.write(fd, b"head")
        os.ftruncate(fd, MIB)
        with mapping(fd, MIB) as address:
            if closed:
                until_closed.close()
            ctypes.memset(address + MIB // 2, ord("s"), 4)
            remote = elsewhere.os("open", str(kv / "file"), os.O_RDONLY)
            assert elsewhere.os("lseek", remote, MIB // 2, os.SEEK_DATA) == MIB // 2
            assert elsewhere.os("lseek", remote, MIB // 2, os.SEEK_HOLE) > MIB // 2
            assert elsewhere.os("lseek", remote, PAGE, os.SEEK_DATA) <= MIB // 2
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                with refused(ENXIO):
                    elsewhere.os("lseek", remote, MIB, whence)
            elsewhere.os("close", remote)
    assert read_file(kv / "file")[MIB // 2 - 1 : MIB // 2 + 5] == b"\0ssss\0"
