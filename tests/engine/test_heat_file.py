"""HEAT: what a save writes, and what a start makes of it."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvfs.core.eviction_policy import Rank
from kvfs.core.pool_layout import HEAT, HEAT_NEW
from kvfs.core.types import InodeNo
from kvfs.storage.heat_file import HeatFile, zero_rows
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.heats import EPOCH, MIB, filled, note, opened, order, touches


@pytest.fixture
def pool_fd(tmp_path: Path) -> Iterator[int]:
    """A pool directory without anything in it."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("call", ["open", "pwrite", "rename"])
def test_a_failed_save_leaves_the_last_one(pool_fd: int, tmp_path: Path, call: str) -> None:
    filled(pool_fd)
    syscalls = FailingSyscalls([call], 1, errno.ENOSPC)
    with syscalls.pause():
        heat = opened(pool_fd, syscalls=syscalls)
    if call == "rename":
        heat._files[0]._end_bytes = 0  # it is written anew
    note(heat, 3000)
    heat.save()
    assert syscalls.failed == 1
    assert not (tmp_path / HEAT_NEW).exists()
    assert len(opened(pool_fd)) == 1451


@pytest.mark.parametrize("call", ["open", "pread", "preadv", "fstat", "stat"])
def test_a_file_that_cannot_be_read_is_a_cold_start(
    pool_fd: int, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(pool_fd)
    syscalls = FailingSyscalls([call], 1, errno.EIO)
    assert len(opened(pool_fd, syscalls=syscalls)) == 0
    assert syscalls.failed == 1
    assert "block heat lost" in caplog.text


def test_a_row_that_moved_during_the_save_is_read_once(pool_fd: int, tmp_path: Path) -> None:
    heat = opened(pool_fd)
    note(heat, 20, 21, 22)
    heat.columns().ino[3] = 20  # what a save sees of it: twice
    heat.save()
    after = opened(pool_fd)
    assert sorted(order(after)) == [20, 21]
    assert after.held_bytes[Rank.PUBLISHED] == 2 * MIB


def test_the_bytes_of_a_block_that_went_during_the_save_are_not_counted(
    pool_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, syscalls = zero_rows(3), Syscalls()
    rows.ino[:] = (20, 21, 22)
    rows.allocated_bytes[:] = MIB
    rows.rank[:] = Rank.PUBLISHED

    def go_first(*_: object, **__: object) -> int:
        rows.ino[0] = 0
        return os.open(HEAT_NEW, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=pool_fd)

    monkeypatch.setattr(syscalls, "open", go_first)  # when what is to be saved was chosen
    HeatFile(pool_fd, syscalls, EPOCH).write(rows, 0)
    after = opened(pool_fd)
    assert sorted(order(after)) == [21, 22]
    assert after.held_bytes[Rank.PUBLISHED] == 2 * MIB


def test_blocks_that_come_and_go_during_the_save_do_not_stop_it(pool_fd: int) -> None:
    """numpy counts what it will return, and fails when it finds more or less of it."""
    rows = zero_rows(1 << 20)
    inos, over = rows.ino.data, threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for row in range(1, 1000):
                inos[row] = 0 if inos[row] else row

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(come_and_go)
        try:
            for _ in range(50):
                HeatFile(pool_fd, Syscalls(), EPOCH).write(rows, 0)
        finally:
            over.set()
        changing.result()
    assert HeatFile(pool_fd, Syscalls(), EPOCH).read() is not None


def test_a_save_writes_what_was_touched_since_the_last_one(pool_fd: int, tmp_path: Path) -> None:
    heat = opened(pool_fd)
    note(heat, *range(20, 50_020))
    heat.save()
    whole_bytes = (tmp_path / HEAT).stat().st_size
    heat.run_due(1.0)
    heat.touch(InodeNo(40_000))
    heat.touch(InodeNo(20))
    heat.save()
    heat.run_due(2.0)
    heat.touch(InodeNo(30))
    heat.save()
    assert (tmp_path / HEAT).stat().st_size < whole_bytes * 1.1
    last = order(heat)[-3:]
    assert last == [40_000, 20, 30]
    after = opened(pool_fd)
    assert order(after) == order(heat)
    assert touches(after, 20) == touches(heat, 20)
    assert after.held_bytes == heat.held_bytes


def test_a_torn_save_costs_its_own_touches_alone(pool_fd: int, tmp_path: Path) -> None:
    heat = opened(pool_fd)
    note(heat, 20, 21, 22)
    heat.save()
    whole_bytes = (tmp_path / HEAT).stat().st_size
    before = order(heat)
    heat.run_due(1.0)
    heat.touch(InodeNo(20))
    heat.save()
    os.truncate(tmp_path / HEAT, (tmp_path / HEAT).stat().st_size - 1)
    after = opened(pool_fd)
    assert order(after) == before
    after.run_due(2.0)
    after.touch(InodeNo(21))
    after.save()
    assert order(opened(pool_fd)) == [20, 22, 21]
    assert (tmp_path / HEAT).stat().st_size > whole_bytes


def test_the_file_is_written_anew_once_it_has_grown_to_twice_its_rows(
    pool_fd: int, tmp_path: Path
) -> None:
    heat = opened(pool_fd)
    note(heat, *range(20, 50_020))
    heat.save()
    whole_bytes = (tmp_path / HEAT).stat().st_size
    sizes = []
    for number in range(6):
        heat.run_due(float(number))
        for ino in range(20, 40_020):
            heat.touch(InodeNo(ino))
        heat.save()
        sizes.append((tmp_path / HEAT).stat().st_size)
    assert max(sizes) < 3 * whole_bytes + (2 << 20)
    assert min(sizes[1:]) < 1.1 * whole_bytes
    assert order(opened(pool_fd)) == order(heat)
