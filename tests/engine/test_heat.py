"""The heat: what touches do, what a scan sees, and what is left of it after a restart."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvfs.core.eviction_policy import BURST_BITS, Rank
from kvfs.core.pool_layout import HEAT
from kvfs.core.types import InodeNo
from tests.support.store.heats import EPOCH, MIB, NOW_S, filled, note, opened, order, touches


@pytest.fixture
def pool_fd(tmp_path: Path) -> Iterator[int]:
    """A pool directory without anything in it."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_who_is_touched_goes_later(pool_fd: int) -> None:
    heat = opened(pool_fd)
    for ino in (20, 21, 22):
        note(heat, ino)
        heat.run_due(float(ino))
    assert order(heat) == [20, 21, 22]
    heat.touch(InodeNo(20))
    heat.touch(InodeNo(99))  # a directory
    assert order(heat) == [21, 22, 20]
    assert len(heat) == 3
    assert InodeNo(20) in heat
    assert InodeNo(99) not in heat


def test_who_is_demoted_goes_first_until_it_is_touched(pool_fd: int) -> None:
    heat = opened(pool_fd)
    for ino in (20, 21, 22):
        note(heat, ino)
        heat.run_due(float(ino))
    heat.demote(InodeNo(22))
    heat.demote(InodeNo(99))  # a directory
    assert order(heat) == [22, 20, 21]
    heat.touch(InodeNo(22))
    assert order(heat) == [20, 21, 22]


def test_touches_are_counted_by_the_burst(pool_fd: int) -> None:
    """LOOKUP, OPEN and utime of one load are one use."""
    heat = opened(pool_fd)
    note(heat, 20)
    heat.touch(InodeNo(20))
    heat.touch(InodeNo(20))
    assert touches(heat, 20) == 1
    heat.run_due(0.0)
    heat.run_due(0.9)  # the burst lasts a second
    heat.touch(InodeNo(20))
    heat.touch(InodeNo(20))
    assert touches(heat, 20) == 2
    heat.run_due(1.0)
    heat.touch(InodeNo(20))
    assert touches(heat, 20) == heat.touches(InodeNo(20)) == 3
    assert heat.touches(InodeNo(99)) == 0


def test_touches_do_not_overflow(pool_fd: int) -> None:
    heat = opened(pool_fd)
    note(heat, 20)
    heat.columns().touches[:] = 65_535
    heat.run_due(1.0)
    heat.touch(InodeNo(20))
    assert touches(heat, 20) == 65_535


@pytest.mark.parametrize("policy", ["arc", "adaptive"])
def test_a_policy_knows_the_name_that_a_block_gets_by_its_rename(pool_fd: int, policy: str) -> None:
    """A block comes as a draft under a temporary name, which is never used again."""
    heat = opened(pool_fd, policy=policy)

    def store(ino: int, temporary: int, final: int) -> None:
        heat.put(InodeNo(ino), MIB, Rank.NEVER, temporary)
        heat.run_due(float(ino))
        heat.touch(InodeNo(ino))
        heat.put(InodeNo(ino), MIB, Rank.PUBLISHED, final)

    for ino in range(20, 30):
        store(ino, 1000 + ino, ino)
    assert touches(heat, 20) == 1
    heat.policy.victims(heat.columns(), bytes_wanted=1, count_max=1)
    if policy == "arc":  # it remembers as many names as there are blocks of the other kind
        for ino in range(25, 30):
            heat.touch(InodeNo(ino))
        heat.policy.victims(heat.columns(), bytes_wanted=1, count_max=1)
    heat.evicted(InodeNo(20))
    store(40, 1040, 20)
    assert touches(heat, 40) == 2
    store(41, 1041, 99)
    assert touches(heat, 41) == 1


def test_a_burst_ends_after_a_small_part_of_all_blocks(pool_fd: int) -> None:
    """Else a pool that is filled within a second would lose what was stored last."""
    heat = opened(pool_fd)
    note(heat, *range(20, 1020))
    bursts = heat.columns().touched[heat.columns().ino != 0] >> BURST_BITS
    assert np.unique_counts(bursts).counts.max() <= 1000 // 64 + 1
    assert max(order(heat)[:20]) < 50


def test_the_bytes_of_each_rank_are_counted(pool_fd: int) -> None:
    heat = opened(pool_fd)
    note(heat, 20, 21)
    note(heat, 22, rank=Rank.NEVER)
    heat.put(InodeNo(20), 3 * MIB, Rank.FIRST, 20)
    assert heat.held_bytes == [MIB, 3 * MIB, MIB, 0, 0, 0, 0]
    heat.drop(InodeNo(21))
    heat.drop(InodeNo(21))
    heat.evicted(InodeNo(20))
    heat.evicted(InodeNo(20))
    assert heat.held_bytes == [MIB, 0, 0, 0, 0, 0, 0]
    assert len(heat) == 1
    assert order(heat) == []


def test_what_becomes_of_a_block_is_no_touch(pool_fd: int) -> None:
    heat = opened(pool_fd)
    note(heat, 20)
    heat.run_due(1.0)
    note(heat, 21)
    heat.run_due(2.0)
    note(heat, 20, rank=Rank.PUBLISHED)
    assert order(heat) == [20, 21]


def test_what_a_search_finds_lies_behind_all_that_is_used(pool_fd: int) -> None:
    heat = opened(pool_fd)
    note(heat, 20)
    heat.put(InodeNo(21), MIB, Rank.PUBLISHED, 21, used_s=NOW_S - 10)
    heat.put(InodeNo(22), MIB, Rank.PUBLISHED, 22, used_s=NOW_S - 20)
    heat.put(InodeNo(23), MIB, Rank.PUBLISHED, 23, used_s=NOW_S + 9999)  # a clock that went back
    assert order(heat) == [22, 21, 23, 20]
    heat.put(InodeNo(20), MIB, Rank.PUBLISHED, 20, used_s=0)  # known: its touches count
    assert order(heat) == [22, 21, 23, 20]


def test_the_policy_hears_of_evictions_and_of_returns(pool_fd: int) -> None:
    heat = opened(pool_fd, policy="arc")
    note(heat, *range(20, 24))
    heat.run_due(1.0)
    heat.touch(InodeNo(22))
    heat.touch(InodeNo(23))
    heat.policy.victims(heat.columns(), bytes_wanted=1, count_max=1)
    heat.evicted(InodeNo(20))
    heat.drop(InodeNo(21))
    heat.put(InodeNo(30), MIB, Rank.PUBLISHED, 20)  # the name of 20
    heat.put(InodeNo(31), MIB, Rank.PUBLISHED, 21)  # a client removed that
    assert touches(heat, 30) == 2
    assert touches(heat, 31) == 1


def test_rows_are_found_however_many_come_and_go(pool_fd: int) -> None:
    heat = opened(pool_fd)
    draw = random.Random(5)
    known: dict[int, int] = {}
    for ino in range(20, 9000):
        size_bytes = draw.randrange(1, 100) * 4096
        heat.put(InodeNo(ino), size_bytes, Rank.PUBLISHED, ino)
        known[ino] = size_bytes
        if draw.random() < 0.4:
            gone = draw.choice(list(known)) if ino % 20 == 0 else next(iter(known))
            heat.drop(InodeNo(gone))
            del known[gone]
    columns = heat.columns()
    used = columns.ino != 0
    found = zip(columns.ino[used].tolist(), columns.allocated_bytes[used].tolist(), strict=True)
    assert dict(found) == known
    assert len(heat) == len(known)
    assert heat.held_bytes[Rank.PUBLISHED] == sum(known.values())


# ---- restarts ----


def test_a_restart_goes_on_where_it_was(pool_fd: int) -> None:
    before = filled(pool_fd)
    after = opened(pool_fd)
    assert order(after) == order(before)
    assert len(after) == len(before) == 1451
    assert after.held_bytes == before.held_bytes
    for ino in range(20, 1520):
        assert (InodeNo(ino) in after) == (ino not in range(100, 150))
    note(after, 2000)
    assert order(after)[-2:] == [2000, 5]  # younger than all, though of the same second
    coldest = order(before)[0]
    after.touch(InodeNo(coldest))
    assert order(after)[-2:] == [coldest, 5] or order(after)[-3:] == [2000, coldest, 5]


@pytest.mark.parametrize("saved_s", [NOW_S + 100, NOW_S + 100_000])
def test_what_was_stored_after_the_last_save_is_younger_than_all_in_it(
    pool_fd: int, tmp_path: Path, saved_s: int
) -> None:
    """The clock may be far ahead of the time of day, since it goes on faster under load."""
    heat = opened(pool_fd)
    note(heat, *range(20, 60))
    for number in range(20_000):
        heat.touch(InodeNo(20 + number % 40))
    assert heat.stamp >> BURST_BITS > NOW_S + 1000
    known = order(heat)
    heat.save()
    os.utime(tmp_path / HEAT, (saved_s, saved_s))
    after = opened(pool_fd, now_s=saved_s + 60)
    for ino, used_s in ((70, saved_s + 50), (71, saved_s), (72, saved_s + 40)):
        after.put(InodeNo(ino), MIB, Rank.PUBLISHED, ino, used_s=used_s)
    note(after, 80)
    after.touch(InodeNo(known[0]))
    assert order(after) == [*known[1:], 71, 72, 70, 80, known[0]]


def test_names_and_touches_survive_too(pool_fd: int) -> None:
    heat = opened(pool_fd)
    note(heat, 20, 21)
    heat.run_due(1.0)
    heat.touch(InodeNo(20))
    heat.save()
    after = opened(pool_fd, policy="arc")
    assert (touches(after, 20), touches(after, 21)) == (2, 1)
    after.policy.victims(after.columns(), bytes_wanted=1, count_max=1)
    after.evicted(InodeNo(21))
    after.put(InodeNo(30), MIB, Rank.PUBLISHED, 21)
    assert touches(after, 30) == 2


@pytest.mark.parametrize("at", [0, 8, 16, 24, 32, 36, 40, 5000, 45_020])
def test_a_damaged_file_is_a_cold_start(pool_fd: int, tmp_path: Path, at: int) -> None:
    filled(pool_fd)
    raw = bytearray((tmp_path / HEAT).read_bytes())
    assert at < len(raw)
    raw[at] ^= 1
    (tmp_path / HEAT).write_bytes(raw)
    assert len(opened(pool_fd)) == 0


@pytest.mark.parametrize("kept_bytes", [0, 39, 40, 1000])
def test_half_a_file_is_a_cold_start(pool_fd: int, tmp_path: Path, kept_bytes: int) -> None:
    filled(pool_fd)
    os.truncate(tmp_path / HEAT, kept_bytes)
    heat = opened(pool_fd)
    assert len(heat) == 0
    note(heat, 20)
    heat.save()
    assert len(opened(pool_fd)) == 1


def test_the_file_of_another_pool_is_a_cold_start(pool_fd: int) -> None:
    filled(pool_fd)
    assert len(opened(pool_fd, epoch=EPOCH + 1)) == 0


def test_the_file_is_the_documents_worked_example(pool_fd: int, tmp_path: Path) -> None:
    heat = opened(pool_fd)
    heat.put(InodeNo(16), 4 * MIB, Rank.PUBLISHED, 0x11223344)
    heat.put(InodeNo(17), 4 * MIB, Rank.PUBLISHED, 0x55667788)
    heat.columns().touches[heat.columns().ino == 17] = 2
    heat.save()
    text = (Path(__file__).parents[2] / "docs/dev/format.md").read_text()
    dump = text.partition("`HEAT`:\n\n")[2].partition("\n\n")[0]
    raw = bytes.fromhex("".join(line.partition("  |")[0].strip()[4:] for line in dump.splitlines()))
    assert (tmp_path / HEAT).read_bytes() == raw


def test_a_read_only_mount_learns_and_writes_nothing(pool_fd: int, tmp_path: Path) -> None:
    heat = opened(pool_fd, read_only=True)
    note(heat, 20)
    heat.touch(InodeNo(20))
    assert len(heat) == 0
    assert not heat.save_due(1e9)
    assert os.listdir(tmp_path) == []


def test_a_save_is_due_once_a_minute_if_anything_was_touched(pool_fd: int) -> None:
    heat = opened(pool_fd)
    note(heat, 20)
    assert heat.save_due(100.0)
    assert not heat.save_due(159.0)
    assert not heat.save_due(160.0)
    heat.touch(InodeNo(20))
    assert not heat.save_due(159.0)
    assert heat.save_due(160.0)
