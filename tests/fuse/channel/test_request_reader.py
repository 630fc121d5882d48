"""Both request readers by themselves: a socket stands for /dev/fuse, and requests come by it."""

import contextlib
import errno
import os
from collections.abc import Iterator

import pytest

from kvfs.core.types import HandleNo, InodeNo
from mount.fuse.channel import choose_reader
from mount.fuse.request_reader import TURN_MESSAGES
from mount.fuse.wire import (
    IN_HEADER,
    IN_HEADER_BYTES,
    OPEN_IN,
    OPEN_OUT,
    RELEASE_IN,
    Grant,
    Opcode,
    data_reply,
    error_reply,
)
from tests.support.store.readers_desk import Desk
from tests.support.store.readers_door import Door
from tests.support.store.stores import host


@pytest.fixture(params=[False, True], ids=["python", "compiled"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    with (
        host() as machine,
        contextlib.closing(Desk(machine, monkeypatch)) as desk,
        contextlib.closing(Door(desk, choose_reader(compiled=request.param))) as made,
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
    assert door.ask(Opcode.SETATTR, 6, known, bytes(88)) == IN_HEADER_BYTES + 88
    assert door.ask(1000, 7, known, bytes(16)) == IN_HEADER_BYTES + 16
    assert not door.replies
    assert not any(door.requests), "who answers counts"
    assert not door.readers(known)


@pytest.mark.parametrize("opcode", [Opcode.FORGET, Opcode.BATCH_FORGET])
def test_what_the_kernel_forgets_is_only_counted(door: Door, opcode: Opcode) -> None:
    """Nobody waits for it, and no one here counts what the kernel has looked up."""
    ino = door.desk.put(b"one")
    assert door.ask(opcode, 1, ino, bytes(8)) == 0
    assert not door.replies
    assert door.requests[opcode] == 1
    assert not any(door.answered)


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


def test_errors_of_the_device_are_raised(door: Door) -> None:
    """The channel knows which of them end the mount, and which mean that a request was aborted."""
    nothing = os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, door.device_fd)
    os.close(nothing)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        door.reader.next(may_wait=True)
