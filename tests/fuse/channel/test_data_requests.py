"""READ and WRITE: within the message what needs no wait, whole or not at all; the rest later."""

import dataclasses
import errno
import os
import random
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.core.errors import KvfsError
from kvfs.core.types import ROOT_INODE, STAT_BLOCK_BYTES, InodeNo
from mount.files.files import Files
from mount.files.handles import Handles
from mount.files.kernel_port import KernelPort
from mount.fuse.errno_map import errno_of
from mount.fuse.late import Late
from mount.fuse.wire import (
    OUT_HEADER,
    OUT_HEADER_BYTES,
    READ_IN,
    WRITE_IN,
    WRITE_OUT,
    Opcode,
)
from mount.requests.data import DataRequests, Transfers
from tests.support.kernel.calls import opened, write_file
from tests.support.kernel.message_counts import ask_status
from tests.support.kernel.present_request import PresentRequest
from tests.support.mounts.mounting import Mounted, loop_device, workplace
from tests.support.store.stores import FILE, MIB, Host, assert_exact, host, put, settle

DATA: Final = random.Random(1).randbytes(100_000)
UNIQUE: Final = 42
Call = Callable[[int, list[memoryview], int, int], int]


class Later(Late):
    """Tells that a task would answer, and starts none."""

    def __init__(self) -> None:
        """Need no nursery."""

    def answer(self, _unique: int, _work: Callable[[], Awaitable[bytes]]) -> bytes:
        """Say so."""
        return b""


LATER: Final = Later()


class Desk:
    """The lane over a store that has one block."""

    def __init__(self, machine: Host, patch: pytest.MonkeyPatch) -> None:
        self.host = machine
        self.fd = os.memfd_create("handles")
        handles = Handles(self.fd)
        settings = dataclasses.replace(machine.settings, data_path="daemon", notifications=False)
        port = KernelPort(-1, settings, handles, lambda port: machine.start(kernel=port).engine)
        self.store = machine.store
        self.files = Files(port, PresentRequest())
        self.transfers = Transfers(self.files)
        self.ino = put(self.store, ROOT_INODE, b"block", DATA)
        settle(self.store)  # what may go is known then
        self.fh, _ = self.files.open(self.ino, os.O_RDONLY)
        self.block_bytes = self.size_on_disk(self.fh)
        # A tmpfs, as here, has no calls that do not wait; its bytes are in memory always.
        self.reads(patch, lambda fd, views, offset_bytes, _: os.preadv(fd, views, offset_bytes))
        self.writes(patch, lambda fd, views, offset_bytes, _: os.pwritev(fd, views, offset_bytes))

    def read(self, fh: int, offset_bytes: int, size_bytes: int) -> bytes | int | None:
        """Return the bytes of the answer, its errno as the channel tells it, or None for none."""
        body = READ_IN.pack(fh, offset_bytes, size_bytes, 0, 0, 0, 0)
        return self.ask(Opcode.READ, body)

    def write(self, fh: int, offset_bytes: int, data: bytes) -> int | None:
        """Return how much was taken, the errno as the channel tells it, or None for no answer."""
        body = WRITE_IN.pack(fh, offset_bytes, len(data), 0, 0, 0, 0) + data
        answer = self.ask(Opcode.WRITE, body)
        if not isinstance(answer, bytes):
            return answer
        size_bytes, padding = WRITE_OUT.unpack(answer)
        assert (size_bytes, padding) == (len(data), 0)
        return size_bytes

    def ask(self, opcode: Opcode, body: bytes) -> bytes | int | None:
        """Return what the lane answers to a request of *opcode* with *body*; None for later."""
        try:
            reply = self.lane(LATER).answers()[opcode](UNIQUE, self.ino, memoryview(body))
        except KvfsError as error:
            return errno_of(error)
        if not reply:
            return None
        assert OUT_HEADER.unpack_from(reply) == (len(reply), 0, UNIQUE)
        return bytes(reply[OUT_HEADER_BYTES:])

    def lane(self, late: Late, *, at_once: bool = True) -> DataRequests:
        """Return the lane, whose other answers *late* gives."""
        return DataRequests(self.transfers, late, at_once=at_once)

    async def asks_late(self, opcode: Opcode, body: bytes) -> tuple[int, bytes]:
        """Return errno and body of the answer that a task gives."""
        replies: list[bytes] = []
        async with trio.open_nursery() as nursery:
            late = Late(nursery, lambda *parts: replies.append(b"".join(parts)))
            request = bytearray(body)
            answer = self.lane(late, at_once=False).answers()[opcode]
            assert answer(UNIQUE, self.ino, memoryview(request)) == b""
            request[:] = bytes(len(request))  # the next request lies there
        (reply,) = replies
        size_bytes, code, unique = OUT_HEADER.unpack_from(reply)
        assert (size_bytes, unique) == (len(reply), UNIQUE)
        return -code, reply[OUT_HEADER_BYTES:]

    def draft(self, reserve_bytes: int, name: bytes = b"draft") -> int:
        """Create a draft whose extent has blocks for *reserve_bytes*; return its handle."""
        fh, _, _, _ = self.files.create(ROOT_INODE, name, FILE, os.O_RDWR, 0, 0)
        opened = self.files.handles.get(fh).opened
        self.store.reserve(opened, reserve_bytes)
        return fh

    def size_on_disk(self, fh: int) -> int:
        """Return what the extent of *fh* holds."""
        return os.fstat(self.files.extent_fd(fh)).st_blocks * STAT_BLOCK_BYTES

    def names(self) -> list[bytes]:
        """Return what lies in the root, by name."""
        return sorted(name for _, name in self.store.children(ROOT_INODE, InodeNo(0)))

    def reads(self, patch: pytest.MonkeyPatch, preadv: Call) -> None:
        """Let *preadv* stand for the system call."""
        patch.setattr(self.store.syscalls, "preadv", preadv)

    def writes(self, patch: pytest.MonkeyPatch, pwritev: Call) -> None:
        """Let *pwritev* stand for the system call."""
        patch.setattr(self.store.syscalls, "pwritev", pwritev)


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
    desk.store.truncate(desk.ino, 200_000)
    fh, _ = desk.files.open(desk.ino, os.O_RDONLY)
    assert desk.read(fh, 99_000, 50_000) == DATA[99_000:] + bytes(49_000)


def test_what_is_not_in_memory_waits_elsewhere(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_now(_fd: int, _views: list[memoryview], _offset_bytes: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        raise BlockingIOError(errno.EAGAIN, "not in memory")

    desk.reads(monkeypatch, not_now)
    assert desk.read(desk.fh, 0, 4096) is None


def test_half_of_it_is_no_answer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short read means the end of the file to the kernel."""

    def half(fd: int, views: list[memoryview], offset_bytes: int, _flags: int) -> int:
        return os.preadv(fd, [views[0][: len(views[0]) // 2]], offset_bytes)

    desk.reads(monkeypatch, half)
    assert desk.read(desk.fh, 0, 8192) is None
    assert desk.read(desk.fh, 99_000, 2000) == DATA[99_000:], "that is all there is"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EIO])
def test_an_error_is_found_out_by_the_thread(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A file system may have no reads of that kind; a drive may fail."""

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    desk.reads(monkeypatch, fail)
    assert desk.read(desk.fh, 0, 4096) is None


def test_more_than_a_message_holds_is_left_to_the_check(desk: Desk) -> None:
    for size_bytes in ((1 << 20) + 1, (1 << 32) - 1):
        body = READ_IN.pack(desk.fh, 0, size_bytes, 0, 0, 0, 0)
        assert desk.lane(LATER).answers()[Opcode.READ](UNIQUE, desk.ino, memoryview(body)) is None


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
    assert desk.store.describe()["lost_blocks"] == 1
    assert desk.names() == [b"block"]


def test_a_message_that_is_too_short_is_refused(desk: Desk) -> None:
    with pytest.raises(struct.error):
        desk.lane(LATER).answers()[Opcode.READ](UNIQUE, desk.ino, memoryview(bytes(20)))


@pytest.mark.parametrize(
    ("offset_bytes", "size_bytes"), [(0, 4096), (0, 1 << 20), (4095, 2), (12_345, 700_000), (0, 0)]
)
def test_what_has_blocks_is_written(desk: Desk, offset_bytes: int, size_bytes: int) -> None:
    """And nothing is asked for, or accounted, that was there before."""
    fh = desk.draft(MIB)
    used_bytes = desk.store.space.used_bytes
    data = random.Random(2).randbytes(size_bytes)
    assert desk.write(fh, offset_bytes, data) == size_bytes
    assert desk.read(fh, offset_bytes, size_bytes) == data
    assert desk.store.space.used_bytes == used_bytes
    desk.files.release(fh)
    assert_exact(desk.host)


def test_the_file_has_a_new_mtime(desk: Desk) -> None:
    """The call would wait for that one."""
    fh = desk.draft(MIB)
    fd = desk.files.extent_fd(fh)
    os.utime(fd, (1, 1))
    assert desk.write(fh, 0, b"bytes") == 5
    assert os.fstat(fd).st_mtime > 1


def test_what_a_write_allocates_has_room_and_is_accounted(desk: Desk) -> None:
    """Others may go for it."""
    put(desk.store, ROOT_INODE, b"tmp", DATA)
    desk.store.rename(ROOT_INODE, b"tmp", ROOT_INODE, b"other", replace=False)
    fh = desk.draft(MIB)
    assert desk.write(fh, MIB - 1, b"ab") == 2
    assert desk.store.space.used_bytes == desk.size_on_disk(fh) + 2 * desk.block_bytes
    desk.store.pledge_all()
    assert desk.write(fh, 2 * MIB, b"ab") == 2
    assert desk.names() == [b"block", b"draft"]
    assert desk.store.space.used_bytes == desk.size_on_disk(fh) + desk.block_bytes


def test_room_that_is_worth_waiting_for_is_waited_for_elsewhere(desk: Desk) -> None:
    """The block is being read; not a byte is written or allocated."""
    fh = desk.draft(MIB)
    desk.store.pledge_all()
    assert desk.write(fh, 2 * MIB, b"a") is None
    assert os.fstat(desk.files.extent_fd(fh)).st_size == 0
    assert desk.names() == [b"block", b"draft"]
    assert desk.store.space.used_bytes == desk.size_on_disk(fh) + desk.block_bytes


def test_a_draft_that_lost_its_reserve_gets_all_of_it_elsewhere(desk: Desk) -> None:
    """One allocation for all that it will likely take, in a thread: at its first write."""
    for number in range(8):
        put(desk.store, ROOT_INODE, b"%d" % number, bytes(4 * MIB))
    fh, _, _, _ = desk.files.create(ROOT_INODE, b"draft", FILE, os.O_RDWR, 0, 0)
    opened = desk.files.handles.get(fh).opened
    os.ftruncate(desk.files.extent_fd(fh), 0)
    desk.store.note_allocated(opened, 0)
    assert desk.write(fh, 0, bytes(MIB)) is None


def test_what_filled_a_hole_is_accounted(desk: Desk) -> None:
    """A file with holes has blocks elsewhere than its first bytes."""
    fh = desk.draft(4096)
    fd = desk.files.extent_fd(fh)
    os.pwrite(fd, bytes(MIB), 8 * MIB)
    opened = desk.files.handles.get(fh).opened
    desk.store.note_allocated(opened, os.fstat(fd).st_blocks * STAT_BLOCK_BYTES)
    assert desk.write(fh, 0, bytes(MIB)) == MIB
    assert opened.allocated_bytes == 2 * MIB
    desk.files.release(fh)
    assert_exact(desk.host)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC])
def test_a_write_that_would_wait_or_fails_is_done_by_the_thread(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A file system without such writes is not asked again: every one would be in vain."""
    asked = []

    def refuse(_fd: int, _views: list[memoryview], _offset_bytes: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        asked.append(code)
        raise OSError(code, os.strerror(code))

    desk.writes(monkeypatch, refuse)
    fh = desk.draft(MIB)
    assert [desk.write(fh, 0, b"bytes") for _ in range(2)] == [None, None]
    assert len(asked) == (1 if code == errno.EOPNOTSUPP else 2)


async def test_a_write_cut_short_is_written_anew(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much came to be written nobody is told but by the thread's own call."""

    def half(fd: int, views: list[memoryview], offset_bytes: int, _flags: int) -> int:
        return os.pwritev(fd, [views[0][: len(views[0]) // 2]], offset_bytes)

    desk.writes(monkeypatch, half)
    fh = desk.draft(MIB)
    assert desk.write(fh, 0, DATA) is None
    assert await desk.transfers.write(fh, 0, DATA) == len(DATA)
    assert desk.read(fh, 0, len(DATA)) == DATA


def test_who_may_not_write_is_refused_elsewhere(desk: Desk) -> None:
    """With the errno that the handler has for it."""
    assert desk.write(desk.fh, 0, b"bytes") is None
    for fh in (0, (1 << 64) - 1):
        assert desk.write(fh, 0, b"bytes") == errno.EBADF
    fh = desk.draft(MIB)
    assert desk.write(fh, (1 << 63) - 1, b"bytes") == errno.EFBIG


def test_a_write_that_is_not_as_long_as_it_says_is_left_to_the_check(desk: Desk) -> None:
    fh = desk.draft(MIB)
    body = WRITE_IN.pack(fh, 0, 6, 0, 0, 0, 0)
    for data in (b"bytes", b"bytes.."):
        request = memoryview(body + data)
        assert desk.lane(LATER).answers()[Opcode.WRITE](UNIQUE, desk.ino, request) is None
    assert os.fstat(desk.files.extent_fd(fh)).st_size == 0


async def test_a_task_answers_what_would_wait(desk: Desk) -> None:
    """With its own copy of the bytes, and with the errno of what fails."""
    fh = desk.draft(4096)
    body = WRITE_IN.pack(fh, 0, len(DATA), 0, 0, 0, 0) + DATA
    assert await desk.asks_late(Opcode.WRITE, body) == (0, WRITE_OUT.pack(len(DATA), 0))
    for offset_bytes, size_bytes in ((0, MIB), (1, 77), (len(DATA), 1)):
        body = READ_IN.pack(fh, offset_bytes, size_bytes, 0, 0, 0, 0)
        expected = DATA[offset_bytes : offset_bytes + size_bytes]
        assert await desk.asks_late(Opcode.READ, body) == (0, expected)
    body = WRITE_IN.pack(desk.fh, 0, 1, 0, 0, 0, 0) + b"1"
    assert await desk.asks_late(Opcode.WRITE, body) == (errno.EBADF, b"")
    desk.files.release(fh)
    body = READ_IN.pack(fh, 0, 1, 0, 0, 0, 0)
    assert await desk.asks_late(Opcode.READ, body) == (errno.EBADF, b"")


@pytest.mark.needs_fuse
@pytest.mark.needs_loop
@pytest.mark.parametrize("lane", ["true", "false"])
def test_on_a_mount(lane: str) -> None:
    """On XFS, which has such calls: by both ways the same bytes."""
    flags = ("--data-path=daemon", "--set", f"fast_lane={lane}")
    with (
        workplace("disk") as place,
        loop_device(512 * MIB) as device,
        Mounted(device, place / "kv", *flags) as mount,
    ):
        data = DATA * 100
        for number in range(8):  # the first tell what a block will take
            path = Path(mount.path / f"{number}")
            write_file(path, data)
        for _ in range(3):
            with opened(path, os.O_RDONLY) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(fd, len(data) + 1, 0) == data
        status = ask_status(mount)
        assert status["requests"]["READ"] >= 3 * len(data) // MIB
        assert status["requests"]["WRITE"] >= 8 * len(data) // MIB
        for kind in ("READ", "WRITE"):
            by_libfuse = status["requests"][kind] - status["requests_fast_path"][kind]
            assert by_libfuse == 0, kind
