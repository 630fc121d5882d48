"""READ answered within the message: what is in memory, whole or not at all."""

import errno
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.errors import KvfsError
from kvfs.types import ROOT_INODE, InodeNo
from mount.data_path import DaemonPath
from mount.errno_door import errno_of
from mount.files import Files
from mount.handles import Handles
from mount.read_lane import ReadLane
from mount.wire import OUT_HEADER, OUT_HEADER_BYTES, READ_IN, Opcode
from tests.support.calls import opened, write_file
from tests.support.message_counts import ask_status
from tests.support.mounting import Mounted, loop_device, workplace
from tests.support.stores import MIB, Host, host, put

DATA: Final = random.Random(1).randbytes(100_000)
UNIQUE: Final = 42


class Desk:
    """The lane over a store that has one block."""

    def __init__(self, machine: Host, patch: pytest.MonkeyPatch) -> None:
        self.host = machine
        self.store = machine.start()
        self.fd = os.memfd_create("handles")
        handles = Handles(self.fd)
        self.files = Files(self.store, handles, DaemonPath(), io_threads=1)
        self.ino = put(self.store, ROOT_INODE, b"block", DATA)
        self.fh, _ = self.files.open(self.ino, os.O_RDONLY)
        # A tmpfs, as here, has no reads that do not wait; its bytes are in memory always.
        self.calls(patch, lambda fd, views, offset_bytes, _: os.preadv(fd, views, offset_bytes))

    def read(self, fh: int, offset_bytes: int, size_bytes: int) -> bytes | int | None:
        """Return the bytes of the answer, its errno as the channel tells it, or None for none."""
        answer = ReadLane(self.files).answers()[Opcode.READ]
        body = READ_IN.pack(fh, offset_bytes, size_bytes, 0, 0, 0, 0)
        try:
            reply = answer(UNIQUE, self.ino, memoryview(body))
        except KvfsError as error:
            return errno_of(error)
        if reply is None:
            return None
        assert OUT_HEADER.unpack_from(reply) == (len(reply), 0, UNIQUE)
        return bytes(reply[OUT_HEADER_BYTES:])

    def calls(self, patch: pytest.MonkeyPatch, preadv: Callable[..., int]) -> None:
        """Let *preadv* stand for the system call."""
        patch.setattr(self.store.pool.syscalls, "preadv", preadv)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with host() as machine:
        made = Desk(machine, monkeypatch)
        yield made
        machine.stop()
        made.files.handles._memory.close()  # a logged error may hold the table
        os.close(made.fd)


@pytest.mark.parametrize(
    ("offset_bytes", "size_bytes"),
    [(0, 4096), (0, 100_000), (0, 1 << 20), (1, 77), (99_999, 4096), (100_000, 1), (1 << 40, 9)],
)
def test_what_is_in_memory_is_answered(desk: Desk, offset_bytes: int, size_bytes: int) -> None:
    """Short at the end of the file, and empty behind it."""
    expected = DATA[offset_bytes : offset_bytes + size_bytes]
    assert desk.read(desk.fh, offset_bytes, size_bytes) == expected


def test_a_hole_is_zeros(desk: Desk) -> None:
    desk.store.blocks.truncate(desk.ino, 200_000)
    fh, _ = desk.files.open(desk.ino, os.O_RDONLY)
    assert desk.read(fh, 99_000, 50_000) == DATA[99_000:] + bytes(49_000)


def test_what_is_not_in_memory_waits_elsewhere(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_now(_fd: int, _views: list[memoryview], _offset_bytes: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        raise BlockingIOError(errno.EAGAIN, "not in memory")

    desk.calls(monkeypatch, not_now)
    assert desk.read(desk.fh, 0, 4096) is None


def test_half_of_it_is_no_answer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short read means the end of the file to the kernel."""

    def half(fd: int, views: list[memoryview], offset_bytes: int, _flags: int) -> int:
        return os.preadv(fd, [views[0][: len(views[0]) // 2]], offset_bytes)

    desk.calls(monkeypatch, half)
    assert desk.read(desk.fh, 0, 8192) is None
    assert desk.read(desk.fh, 99_000, 2000) == DATA[99_000:], "that is all there is"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EIO])
def test_an_error_is_found_out_by_the_thread(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A file system may have no reads of that kind; a drive may fail."""

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    desk.calls(monkeypatch, fail)
    assert desk.read(desk.fh, 0, 4096) is None


def test_more_than_a_message_holds_is_left_to_libfuse(desk: Desk) -> None:
    assert desk.read(desk.fh, 0, (1 << 20) + 8193) is None
    assert desk.read(desk.fh, 0, (1 << 32) - 1) is None


def test_a_handle_that_is_none_is_ebadf(desk: Desk) -> None:
    directory = desk.files.open_directory(ROOT_INODE)
    assert desk.read(directory, 0, 4096) == errno.EBADF
    desk.files.release(directory)
    for fh in (directory, 0, (1 << 64) - 1):
        assert desk.read(fh, 0, 4096) == errno.EBADF


@pytest.mark.usefixtures("caplog")
def test_a_block_without_its_extent_is_dismissed_once(desk: Desk) -> None:
    other = put(desk.store, ROOT_INODE, b"other", DATA)
    fh, _ = desk.files.open(other, os.O_RDONLY)
    desk.host.extent(other).unlink()
    assert desk.read(fh, 0, 4096) == errno.ESTALE
    assert desk.store.pool.dismissed == 1
    assert [name for _, name in desk.store.namespace.children(ROOT_INODE, InodeNo(0))] == [b"block"]


def test_a_message_that_is_too_short_is_refused(desk: Desk) -> None:
    with pytest.raises(struct.error):
        ReadLane(desk.files).answers()[Opcode.READ](UNIQUE, desk.ino, memoryview(bytes(20)))


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
@pytest.mark.parametrize("lane", ["true", "false"])
def test_on_a_mount(lane: str) -> None:
    """On XFS, which has such reads: by both ways the same bytes."""
    flags = ("--data-path=daemon", "--set", f"fast_lane={lane}")
    with (
        workplace("disk") as place,
        loop_device(512 * MIB) as device,
        Mounted(device, place / "kv", *flags) as mount,
    ):
        path = Path(mount.path / "block")
        data = DATA * 100
        write_file(path, data)
        for _ in range(3):
            with opened(path, os.O_RDONLY) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(fd, len(data) + 1, 0) == data
        status = ask_status(mount)
        assert status["requests"]["READ"] >= 3 * len(data) // MIB
        here = status["answered_in_channel"].get("READ", 0)
        assert (here > 0) == (lane == "true")
        assert here <= status["requests"]["READ"]
