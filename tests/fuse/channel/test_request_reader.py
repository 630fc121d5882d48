"""The intake by itself: a socket stands for /dev/fuse, and readers' requests come in through it."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.types import HandleNo, InodeNo
from mount.fuse.request_reader import TURN_MESSAGES, RequestReader
from mount.fuse.wire import (
    IN_HEADER,
    IN_HEADER_BYTES,
    OPCODES,
    OPEN_IN,
    OPEN_OUT,
    RELEASE_IN,
    Grant,
    Opcode,
    data_reply,
    error_reply,
)
from tests.support.store.readers_desk import Desk
from tests.support.store.stores import host

BUFFER_BYTES: Final = 4096


class Door:
    """An intake before the files of a desk; ``kernel`` is the test's end of the device."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.kernel, self._device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.replies: list[bytes] = []
        self.now_ns = 0
        self.requests, self.answered = [0] * OPCODES, [0] * OPCODES
        self.idle = lambda: False
        self.reader = RequestReader(
            self._device.fileno(),
            bytearray(BUFFER_BYTES),
            busy_poll_us=40,
            counted=(self.requests, self.answered),
            reply=self.replies.append,
            readers=desk.files.readers,
            idle=lambda: self.idle(),
            clock_ns=self.clock_ns,
        )
        self.reader.begin_turn()

    def clock_ns(self) -> int:
        """Look at the clock."""
        return self.now_ns

    def ask(self, opcode: int, unique: int, ino: InodeNo, body: bytes) -> int:
        """Send a request; return the size of one that is left to others, 0 if there is none."""
        size_bytes = IN_HEADER_BYTES + len(body)
        head = IN_HEADER.pack(size_bytes, opcode, unique, ino, 0, 0, 0, 0, 0)
        self.kernel.send(head + body)
        return self.reader.next(may_wait=False)

    def open(self, unique: int, ino: InodeNo, flags: int = os.O_RDONLY) -> int:
        """Ask for an open."""
        return self.ask(Opcode.OPEN, unique, ino, OPEN_IN.pack(flags, 0))

    def release(self, unique: int, ino: InodeNo, fh: HandleNo) -> int:
        """Ask for a close."""
        return self.ask(Opcode.RELEASE, unique, ino, RELEASE_IN.pack(fh, 0, 0, 0))

    def readers(self, ino: InodeNo) -> int:
        """Return how many readers are counted."""
        store = self.desk.store
        return store.opened(ino).readers if ino in store.open_inos else 0

    def close(self) -> None:
        """Close both ends, and let go of the files."""
        self.reader.answer_nothing()
        self.kernel.close()
        self._device.close()


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    with (
        host() as machine,
        contextlib.closing(Desk(machine, monkeypatch)) as desk,
        contextlib.closing(Door(desk)) as made,
    ):
        yield made


def opened(unique: int, told: tuple[HandleNo, Grant]) -> bytes:
    """Return the reply that a granted open gets."""
    fh, grant = told
    return data_reply(unique, OPEN_OUT.pack(fh, grant.open_flags, grant.backing_id))


def test_opens_and_closes_of_known_readers_end_here(door: Door) -> None:
    ino = door.desk.put(b"one")
    told = door.desk.load(ino)
    assert [door.open(7, ino), door.open(8, ino)] == [0, 0]
    assert door.readers(ino) == len(door.desk.handles) == 2
    assert [door.release(9, ino, told[0]), door.release(10, ino, told[0])] == [0, 0]
    assert door.readers(ino) == len(door.desk.handles) == 0
    expected = [opened(7, told), opened(8, told), error_reply(9, 0), error_reply(10, 0)]
    assert door.replies == expected
    for counted in (door.requests, door.answered):
        assert (counted[Opcode.OPEN], counted[Opcode.RELEASE], sum(counted)) == (2, 2, 4)


def test_what_others_must_answer_is_left_whole_in_the_buffer(door: Door) -> None:
    known, unknown = door.desk.put(b"one"), door.desk.put(b"two")
    fh, _ = door.desk.load(known)
    whole_bytes = IN_HEADER_BYTES + OPEN_IN.size
    assert door.open(1, unknown) == whole_bytes
    assert door.open(2, known, os.O_RDONLY | os.O_DIRECT) == whole_bytes
    assert door.open(3, known, os.O_WRONLY) == whole_bytes
    assert door.release(4, known, fh) == IN_HEADER_BYTES + RELEASE_IN.size, "nobody has it open"
    assert door.release(5, unknown, fh) == IN_HEADER_BYTES + RELEASE_IN.size
    assert door.ask(Opcode.GETATTR, 6, known, bytes(16)) == IN_HEADER_BYTES + 16
    assert door.ask(1000, 7, known, bytes(16)) == IN_HEADER_BYTES + 16
    assert not door.replies
    assert not any(door.requests), "who answers counts"
    assert not door.readers(known)


def test_a_request_that_ends_too_early_is_left_to_others(door: Door) -> None:
    """What stands behind it in the buffer belongs to an earlier one."""
    ino = door.desk.put(b"one")
    door.desk.load(ino)
    assert door.open(1, ino) == 0
    short = OPEN_IN.pack(os.O_RDONLY, 0)[:-1]
    assert door.ask(Opcode.OPEN, 2, ino, short) == IN_HEADER_BYTES + len(short)
    assert door.readers(ino) == 1


def test_a_block_that_changed_is_left_to_others(door: Door) -> None:
    ino = door.desk.put(b"one")
    door.desk.load(ino)
    door.desk.unlink(b"one")
    assert door.open(1, ino) == IN_HEADER_BYTES + OPEN_IN.size


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no index"), AssertionError("a bug")])
def test_what_fails_is_left_to_who_answers_errors(
    door: Door, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    ino = door.desk.put(b"one")
    door.desk.load(ino)
    store = door.desk.store
    store.forget_parsed()

    def fails(_ino: InodeNo) -> None:
        raise type(error)(*error.args)

    with monkeypatch.context() as patch:
        store.fail_rows(patch, fails)
        assert door.open(1, ino) == IN_HEADER_BYTES + OPEN_IN.size
    assert not door.readers(ino)
    assert door.open(2, ino) == 0


def test_without_readers_all_is_left_to_others(door: Door) -> None:
    ino = door.desk.put(b"one")
    door.desk.load(ino)
    door.reader.answer_nothing()
    assert door.open(1, ino) == IN_HEADER_BYTES + OPEN_IN.size


def test_readers_leave_turns_to_others(door: Door) -> None:
    ino = door.desk.put(b"one")
    door.desk.load(ino)
    head = IN_HEADER.pack(IN_HEADER_BYTES + OPEN_IN.size, Opcode.OPEN, 1, ino, 0, 0, 0, 0, 0)
    for _ in range(TURN_MESSAGES + 1):
        door.kernel.send(head + OPEN_IN.pack(os.O_RDONLY, 0))
    assert door.reader.next(may_wait=False) == 0
    assert door.reader.left == 0
    assert len(door.replies) == TURN_MESSAGES
    door.reader.begin_turn()
    assert door.reader.next(may_wait=False) == 0
    assert len(door.replies) == TURN_MESSAGES + 1


def test_readers_who_come_slowly_leave_turns_to_others_too(door: Door) -> None:
    """The tick looks at drafts that nobody stops meanwhile."""
    ino = door.desk.put(b"one")
    door.desk.load(ino)
    head = IN_HEADER.pack(IN_HEADER_BYTES + OPEN_IN.size, Opcode.OPEN, 1, ino, 0, 0, 0, 0, 0)
    asked = head + OPEN_IN.pack(os.O_RDONLY, 0)

    def asleep() -> bool:
        """No request waits, nor any work; the next one comes 3 ms later."""
        door.now_ns += 3_000_000
        door.kernel.send(asked)
        return False

    door.idle = asleep
    assert door.reader.next(may_wait=True) == 0
    assert door.reader.left == 0
    assert len(door.replies) == 7, "the first one after 20 ms is the last one"
    door.reader.begin_turn()
    assert door.reader.next(may_wait=True) == 0
    assert len(door.replies) == 2 * 7


def test_work_is_done_while_no_request_waits_and_counts_for_the_turn(door: Door) -> None:
    jobs = list(range(TURN_MESSAGES + 5))

    def job() -> bool:
        return bool(jobs) and jobs.pop() >= 0

    door.idle = job
    assert door.reader.next(may_wait=False) == 0
    assert (door.reader.left, len(jobs)) == (0, 5)
    ino = door.desk.put(b"one")
    door.reader.begin_turn()
    assert door.open(1, ino), "a request comes before work"
    assert len(jobs) == 5
