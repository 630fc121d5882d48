"""Locks between processes of one host: the kernel keeps them, kvfs must only not be in the way."""

import fcntl
import os
import struct
from collections.abc import Iterator
from errno import EACCES, EAGAIN
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients.callers import Caller, callers
from tests.support.kernel.calls import opened, refused, write_file

pytestmark = pytest.mark.one_data_path

#: struct flock of 64-bit Linux: type, whence, start, length, pid.
FLOCK: Final = struct.Struct("hhqqi4x")
EX_NB: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
SH_NB: Final = fcntl.LOCK_SH | fcntl.LOCK_NB


@pytest.fixture
def pair(kv: Path) -> Iterator[tuple[Caller, int, Caller, int]]:
    """Two processes, each with a descriptor of one file."""
    write_file(kv / "file", b"content")
    with callers(2) as (one, two):
        fds = [caller.os("open", str(kv / "file"), os.O_RDWR) for caller in (one, two)]
        yield one, fds[0], two, fds[1]


def ranged(kind: int, start: int, length: int) -> bytes:
    """Return a struct flock as bytes."""
    return FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def test_flock_excludes_and_shares(pair: tuple[Caller, int, Caller, int]) -> None:
    """[locks-flock] Exclusive against all, shared among shared, free after unlock."""
    one, fd_one, two, fd_two = pair
    one.fcntl("flock", fd_one, EX_NB)
    for kind in (EX_NB, SH_NB):
        with refused(EAGAIN):
            two.fcntl("flock", fd_two, kind)
    one.fcntl("flock", fd_one, SH_NB)
    two.fcntl("flock", fd_two, SH_NB)
    with refused(EAGAIN):
        two.fcntl("flock", fd_two, EX_NB)
    one.fcntl("flock", fd_one, fcntl.LOCK_UN)
    two.fcntl("flock", fd_two, EX_NB)


def test_flock_ends_with_the_process(pair: tuple[Caller, int, Caller, int]) -> None:
    """[locks-flock] A waiting process gets the lock when its holder is killed."""
    one, fd_one, two, fd_two = pair
    one.fcntl("flock", fd_one, EX_NB)
    two.send("fcntl", "flock", fd_two, fcntl.LOCK_EX)
    one.close()
    assert two.receive() is None


def test_flock_ends_with_the_descriptor(kv: Path) -> None:
    """[locks-flock] Two descriptors of one process exclude each other; closing frees."""
    write_file(kv / "file", b"")
    with opened(kv / "file", os.O_RDONLY) as second:
        with opened(kv / "file", os.O_RDONLY) as first:
            fcntl.flock(first, EX_NB)
            with refused(EAGAIN):
                fcntl.flock(second, EX_NB)
        fcntl.flock(second, EX_NB)


def test_posix_locks_of_ranges(pair: tuple[Caller, int, Caller, int]) -> None:
    """[locks-fcntl] Ranges that meet exclude, ranges apart do not, and F_GETLK names the holder."""
    one, fd_one, two, fd_two = pair
    one.fcntl("lockf", fd_one, EX_NB, 10, 100)
    two.fcntl("lockf", fd_two, EX_NB, 10, 110)
    with refused(EAGAIN, EACCES):
        two.fcntl("lockf", fd_two, EX_NB, 20, 95)
    answer = two.fcntl("fcntl", fd_two, fcntl.F_GETLK, ranged(fcntl.F_WRLCK, 105, 1))
    kind, _, start, length, pid = FLOCK.unpack(answer)
    assert (kind, start, length, pid) == (fcntl.F_WRLCK, 100, 10, one.pid)
    one.fcntl("lockf", fd_one, fcntl.LOCK_UN, 5, 100)
    two.fcntl("lockf", fd_two, EX_NB, 5, 100)


def test_posix_locks_end_with_any_close(pair: tuple[Caller, int, Caller, int], kv: Path) -> None:
    """[locks-fcntl] POSIX's own oddity: closing any descriptor of the file frees them all."""
    one, fd_one, two, fd_two = pair
    one.fcntl("lockf", fd_one, EX_NB)
    with refused(EAGAIN, EACCES):
        two.fcntl("lockf", fd_two, EX_NB)
    one.os("close", one.os("open", str(kv / "file"), os.O_RDONLY))
    two.fcntl("lockf", fd_two, EX_NB)


def test_a_waiter_is_woken_by_the_unlock(pair: tuple[Caller, int, Caller, int]) -> None:
    """[locks-fcntl] F_SETLKW waits for the range and then has it."""
    one, fd_one, two, fd_two = pair
    one.fcntl("lockf", fd_one, EX_NB)
    two.send("fcntl", "lockf", fd_two, fcntl.LOCK_EX)
    one.fcntl("lockf", fd_one, fcntl.LOCK_UN)
    assert two.receive() is None
    with refused(EAGAIN, EACCES):
        one.fcntl("lockf", fd_one, EX_NB)


def test_locks_of_open_file_descriptions(kv: Path) -> None:
    """[locks-fcntl] F_OFD_SETLK excludes between two descriptors of one process."""
    write_file(kv / "file", b"content")
    with (
        opened(kv / "file", os.O_RDWR) as first,
        opened(kv / "file", os.O_RDWR) as second,
    ):
        fcntl.fcntl(first, fcntl.F_OFD_SETLK, ranged(fcntl.F_WRLCK, 0, 4))
        with refused(EAGAIN, EACCES):
            fcntl.fcntl(second, fcntl.F_OFD_SETLK, ranged(fcntl.F_RDLCK, 3, 4))
        fcntl.fcntl(second, fcntl.F_OFD_SETLK, ranged(fcntl.F_WRLCK, 4, 4))
        fcntl.fcntl(first, fcntl.F_OFD_SETLK, ranged(fcntl.F_UNLCK, 0, 4))
        fcntl.fcntl(second, fcntl.F_OFD_SETLK, ranged(fcntl.F_RDLCK, 0, 4))
