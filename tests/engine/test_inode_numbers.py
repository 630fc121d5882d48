"""Inode numbers: never twice, whatever fails and whenever the machine stops."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.core.drives import SERIAL_END, Numbering
from kvfs.core.errors import IndexDamaged, NotAtHand
from kvfs.core.pool_layout import INODES
from kvfs.core.types import FIRST_DRIVE, FIRST_INODE, DriveNo, InodeNo
from kvfs.engine.recovery import file_claims
from kvfs.storage.extents import Extents
from kvfs.storage.inode_numbers import RANGE_NUMBERS, InodeNumbers, parse_end
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.failing_syscalls import FailingSyscalls


@pytest.fixture
def pool_fd(tmp_path: Path) -> Iterator[int]:
    """A pool directory with a fresh INODES."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    InodeNumbers.create(fd, Syscalls())
    yield fd
    os.close(fd)


@pytest.fixture
def numbers(pool_fd: int) -> Iterator[InodeNumbers]:
    opened = InodeNumbers((pool_fd,), Syscalls())
    yield opened
    opened.close()


class DurableEnd(Syscalls):
    """Knows what INODES would hold after a power loss: what was written before the last fsync."""

    def __init__(self) -> None:
        self.durable = 0
        self._written = 0
        for name, call in (("pwrite", self._noted_pwrite), ("fsync", self._noted_fsync)):
            setattr(self, name, call)

    def _noted_pwrite(self, fd: int, data: bytes, offset: int, /) -> int:
        self._written = parse_end(data)
        return os.pwrite(fd, data, offset)

    def _noted_fsync(self, fd: int) -> None:
        os.fsync(fd)
        self.durable = self._written


def due(numbers: InodeNumbers) -> bool:
    """Ask afresh: mypy takes a property for a constant."""
    return numbers.refill_due


def test_numbers_begin_behind_the_reserved_ones_and_count_up(numbers: InodeNumbers) -> None:
    assert [numbers.give_out() for _ in range(3)] == [FIRST_INODE, FIRST_INODE + 1, FIRST_INODE + 2]


def test_opening_alone_writes_nothing(pool_fd: int, tmp_path: Path) -> None:
    before = (tmp_path / INODES).read_bytes()
    opened = InodeNumbers((pool_fd,), FailingSyscalls(["pwrite", "fsync"], 1))
    opened.close()
    assert (tmp_path / INODES).read_bytes() == before


def test_every_number_lies_below_an_end_that_is_durable(pool_fd: int) -> None:
    syscalls = DurableEnd()
    opened = InodeNumbers((pool_fd,), syscalls)
    try:
        for _ in range(2 * RANGE_NUMBERS + 10):
            assert opened.give_out() < syscalls.durable
    finally:
        opened.close()


def test_a_restart_goes_on_behind_the_range(pool_fd: int) -> None:
    taken: list[InodeNo] = []
    for _ in range(5):
        opened = InodeNumbers((pool_fd,), Syscalls())
        taken += [opened.give_out() for _ in range(3)]
        opened.close()
    assert taken == sorted(set(taken))


def test_a_refill_in_time_keeps_take_from_waiting(pool_fd: int) -> None:
    syscalls = FailingSyscalls(["fsync"])
    opened = InodeNumbers((pool_fd,), syscalls)
    try:
        assert due(opened)
        opened.refill()
        assert not due(opened)
        opened.refill()
        assert syscalls.calls == 1
        for _ in range(RANGE_NUMBERS // 2 + 1):
            opened.give_out()
        assert due(opened)
        opened.refill()
        for _ in range(RANGE_NUMBERS - 1):
            opened.give_out()
        assert syscalls.calls == 2
    finally:
        opened.close()


@pytest.mark.parametrize("name", ["pwrite", "fsync"])
@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_failed_refill_gives_out_nothing_new_and_may_be_tried_again(
    pool_fd: int, name: str, fail_at: int
) -> None:
    opened = InodeNumbers((pool_fd,), FailingSyscalls([name], fail_at, errno.EIO))
    taken: list[InodeNo] = []
    failures = 0
    try:
        while len(taken) < 2 * RANGE_NUMBERS:
            try:
                taken.append(opened.give_out())
            except OSError:
                failures += 1
    finally:
        opened.close()
    assert failures == 1
    assert taken == list(range(FIRST_INODE, FIRST_INODE + 2 * RANGE_NUMBERS))
    reopened = InodeNumbers((pool_fd,), Syscalls())
    try:
        assert reopened.give_out() > taken[-1]
    finally:
        reopened.close()


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 12, b"\x10" + b"\0" * 11, b"x" * 13, b"\x10\0\0\0\0\0\0\0"]
)
def test_a_damaged_file_is_refused(pool_fd: int, tmp_path: Path, content: bytes) -> None:
    (tmp_path / INODES).write_bytes(content)
    with pytest.raises(IndexDamaged, match=INODES):
        InodeNumbers((pool_fd,), Syscalls())
    assert (tmp_path / INODES).read_bytes() == content


def test_a_missing_file_is_refused(pool_fd: int, tmp_path: Path) -> None:
    (tmp_path / INODES).unlink()
    with pytest.raises(IndexDamaged, match="missing"):
        InodeNumbers((pool_fd,), Syscalls())


def test_repair_starts_behind_the_highest_number_found(pool_fd: int, tmp_path: Path) -> None:
    InodeNumbers.create(pool_fd, Syscalls(), InodeNo(1 << 40))
    opened = InodeNumbers((pool_fd,), Syscalls())
    try:
        assert opened.give_out() == 1 << 40
    finally:
        opened.close()
    assert (tmp_path / INODES).stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / INODES).read_bytes()) == 12


# ---- several drives ----

_SECOND = DriveNo(1)


@pytest.fixture
def pool_fds(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two drives, each with a fresh INODES."""
    fds = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        fds.append(os.open(tmp_path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        InodeNumbers.create(fds[-1], Syscalls())
    yield fds[0], fds[1]
    for fd in fds:
        os.close(fd)


def test_drives_share_one_row_of_serial_numbers(pool_fds: tuple[int, int]) -> None:
    opened, numbering = InodeNumbers(pool_fds, Syscalls()), Numbering(2)
    drives = [FIRST_DRIVE, _SECOND, _SECOND, FIRST_DRIVE]
    try:
        taken = [opened.give_out(drive) for drive in drives]
        assert [numbering.drive(ino) for ino in taken] == drives
        assert [opened.serial(ino) for ino in taken] == list(range(FIRST_INODE, FIRST_INODE + 4))
    finally:
        opened.close()


def test_a_number_is_given_out_when_its_own_drive_has_made_it_durable(
    pool_fds: tuple[int, int], tmp_path: Path
) -> None:
    opened = InodeNumbers(pool_fds, Syscalls())
    try:
        opened.give_out(_SECOND)
        assert parse_end((tmp_path / "first" / INODES).read_bytes()) == FIRST_INODE
        opened.require(at_once=False, drive=_SECOND)
        with pytest.raises(NotAtHand) as lacking:
            opened.require(at_once=False, drive=FIRST_DRIVE)
        lacking.value.begin()()()
        opened.require(at_once=False, drive=FIRST_DRIVE)
    finally:
        opened.close()


@pytest.mark.parametrize("drive", [FIRST_DRIVE, _SECOND])
def test_a_range_that_is_lacking_is_fetched_by_its_own_drive_alone(
    pool_fds: tuple[int, int], tmp_path: Path, drive: DriveNo
) -> None:
    """The other one may not answer."""
    opened = InodeNumbers(pool_fds, Syscalls())
    try:
        with pytest.raises(NotAtHand) as lacking:
            opened.require(at_once=False, drive=drive)
        assert Numbering(2).drive(lacking.value.ino) == drive
        lacking.value.begin()()()
        ends = [parse_end((tmp_path / one / INODES).read_bytes()) for one in ("first", "second")]
        assert [end > FIRST_INODE for end in ends] == [one == drive for one in range(2)]
    finally:
        opened.close()


def test_a_refill_is_begun_once_for_each_drive_until_it_has_ended(
    pool_fds: tuple[int, int],
) -> None:
    """A drive that does not answer gets no queue of them, and the other one goes on."""
    syscalls = FailingSyscalls(["fsync"])
    opened = InodeNumbers(pool_fds, syscalls)
    try:
        assert opened.begin_refills() == [FIRST_DRIVE, _SECOND]
        assert opened.begin_refills() == []
        opened.refill(_SECOND)
        assert opened.begin_refills() == []
        syscalls.fail_at = syscalls.calls + 1
        with pytest.raises(OSError, match="Input/output error"):
            opened.refill(FIRST_DRIVE)
        assert opened.begin_refills() == [FIRST_DRIVE], "it failed, and is tried again"
    finally:
        opened.close()


def test_a_start_goes_on_behind_the_end_of_the_drive_that_was_written_last(
    pool_fds: tuple[int, int],
) -> None:
    opened = InodeNumbers(pool_fds, Syscalls())
    taken = [opened.give_out(_SECOND) for _ in range(3)]
    opened.close()
    again = InodeNumbers(pool_fds, Syscalls())
    try:
        taken += [again.give_out(drive) for drive in (FIRST_DRIVE, _SECOND)]
        serials = [again.serial(ino) for ino in taken]
        assert serials == sorted(set(serials))
        assert again.serial(taken[-2]) >= again.first == FIRST_INODE + RANGE_NUMBERS
    finally:
        again.close()


def test_a_serial_number_that_would_name_a_drive_is_refused(pool_fds: tuple[int, int]) -> None:
    InodeNumbers.create(pool_fds[0], Syscalls(), SERIAL_END)
    with pytest.raises(IndexDamaged, match="drive's number"):
        InodeNumbers(pool_fds, Syscalls())
    alone = InodeNumbers(pool_fds[:1], Syscalls())
    try:
        assert alone.give_out() == SERIAL_END  # one drive has no bits for its number
    finally:
        alone.close()


def test_where_very_many_numbers_may_be_in_use_all_files_are_listed(
    pool_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not asked for one by one."""
    monkeypatch.setattr(file_claims, "_ASKED_MOST", 1000)
    asked = FailingSyscalls(["stat"])
    before = InodeNumbers((pool_fd,), Syscalls())
    extents = Extents((pool_fd,), asked, "tmpfs")
    inos = [before.give_out() for _ in range(5)]
    for ino in inos[1:]:
        os.close(extents.create(ino, 0))
    before.close()
    numbers = InodeNumbers((pool_fd,), Syscalls())
    pool: Any = SimpleNamespace(extents=extents, numbers=numbers)
    asked.calls = 0
    assert 1000 < numbers.first - inos[0] < 1_000_000
    assert list(file_claims.young_inodes(pool, inos[2])) == inos[2:]
    assert asked.calls < 100
    numbers.close()
    extents.close()
