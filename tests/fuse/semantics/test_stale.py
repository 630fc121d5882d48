"""Sizes that move while others look: extending writers, stale readers, many descriptors."""

import itertools
import mmap
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

from tests.support.clients.callers import Caller
from tests.support.kernel.calls import opened, read_file, write_file

STEP_BYTES = 3_333


def test_a_reader_reads_on_behind_the_old_end(kv: Path) -> None:
    """[read-stale-size] Appended bytes are seen by descriptors that had met the end before."""
    write_file(kv / "file", b"start")
    with (
        opened(kv / "file", os.O_RDONLY) as reader,
        opened(kv / "file", os.O_WRONLY | os.O_APPEND) as writer,
        Caller() as elsewhere,
    ):
        remote = elsewhere.os("open", str(kv / "file"), os.O_RDONLY)
        assert os.read(reader, 100) == elsewhere.os("read", remote, 100) == b"start"
        for number in range(20):
            assert os.read(reader, 1) == elsewhere.os("read", remote, 1) == b""
            piece = bytes([number]) * (number * 997 + 1)
            os.write(writer, piece)
            assert os.read(reader, 1 << 20) == piece
            assert elsewhere.os("read", remote, 1 << 20) == piece


def test_a_reader_sees_a_truncate(kv: Path) -> None:
    """[read-stale-size] The other way too: what was cut off is gone for every descriptor."""
    write_file(kv / "file", b"\xff" * 10_000)
    with opened(kv / "file", os.O_RDONLY) as reader, Caller() as elsewhere:
        assert len(os.pread(reader, 20_000, 0)) == 10_000
        elsewhere.os("truncate", str(kv / "file"), 4_000)
        assert os.pread(reader, 20_000, 0) == b"\xff" * 4_000
        assert os.fstat(reader).st_size == 4_000
        elsewhere.os("truncate", str(kv / "file"), 9_000)
        assert os.pread(reader, 20_000, 0) == b"\xff" * 4_000 + bytes(5_000)


def test_sizes_only_grow_while_a_file_is_extended(kv: Path) -> None:
    """[fstat-extending] fstat and stat during 400 extending writes: reached sizes, in order."""
    finished = threading.Event()
    reached = [0]
    wrong: list[str] = []

    def look(stat: Callable[[], os.stat_result]) -> None:
        last = 0
        while not finished.is_set():
            least = reached[0]
            size = stat().st_size
            if not max(last, least) <= size <= reached[0] + STEP_BYTES:
                wrong.append(f"{size} after {last}, {least} written")
                return
            last = size

    with (
        opened(kv / "file", os.O_CREAT | os.O_WRONLY) as writer,
        opened(kv / "file", os.O_RDONLY) as reader,
    ):
        looks = [
            lambda: os.fstat(reader),
            lambda: os.fstat(writer),
            lambda: os.stat(kv / "file"),
        ]
        lookers = [threading.Thread(target=look, args=(stat,)) for stat in looks]
        for looker in lookers:
            looker.start()
        try:
            for number in range(400):
                assert os.write(writer, bytes([number % 256]) * STEP_BYTES) == STEP_BYTES
                reached[0] = (number + 1) * STEP_BYTES
        finally:
            finished.set()
            for looker in lookers:
                looker.join()
    assert not wrong
    assert os.stat(kv / "file").st_size == 400 * STEP_BYTES


def test_descriptors_of_every_kind_share_one_content(kv: Path) -> None:
    """[open-many] Opened and closed in random order with any flags; reads see every write."""
    chance = random.Random(3)
    kinds = [
        access | extra
        for access, extra in itertools.product(
            (os.O_RDONLY, os.O_WRONLY, os.O_RDWR),
            (0, os.O_APPEND, os.O_DIRECT, os.O_SYNC, os.O_NOATIME),
        )
    ]
    page = 4096
    model = bytearray(random.Random(1).randbytes(16 * page))
    write_file(kv / "file", bytes(model))
    open_fds: list[tuple[int, int]] = []
    try:
        for step in range(250):
            if len(open_fds) < 8 or chance.random() < 0.3:
                flags = chance.choice(kinds)
                open_fds.append((os.open(kv / "file", flags), flags))
            fd, flags = chance.choice(open_fds)
            aligned = bool(flags & os.O_DIRECT)
            if flags & os.O_ACCMODE != os.O_RDONLY and not aligned:
                at, data = chance.randrange(len(model) - 100), bytes([step]) * 100
                at = len(model) if flags & os.O_APPEND else at
                assert os.pwrite(fd, data, at) == 100
                model[at : at + 100] = data
            elif flags & os.O_ACCMODE != os.O_WRONLY:
                at = chance.randrange(8) * page
                assert read_at(fd, at, page, aligned) == bytes(model[at : at + page])
            if len(open_fds) > 1 and chance.random() < 0.35:
                os.close(open_fds.pop(chance.randrange(len(open_fds)))[0])
            assert os.stat(kv / "file").st_size == len(model)
    finally:
        for fd, _ in open_fds:
            os.close(fd)
    assert read_file(kv / "file") == bytes(model)


def read_at(fd: int, at: int, size_bytes: int, aligned: bool) -> bytes:
    """Read by pread, or into aligned memory for a direct descriptor."""
    if not aligned:
        return os.pread(fd, size_bytes, at)
    with mmap.mmap(-1, size_bytes) as memory:
        assert os.preadv(fd, [memory], at) == size_bytes
        return memory[:]
