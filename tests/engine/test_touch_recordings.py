"""What a recording is told of the heat: in order, once, within bounds, and by numbers alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvfs.core.errors import SourceBusy
from kvfs.core.eviction_policy import Rank
from kvfs.core.types import FIRST_INODE, ROOT_INODE, InodeNo, InodeRecord, Sequence
from kvfs.pool.figures.touch_recordings import (
    BLOCKS_MAX,
    IDLE_MAX_S,
    RECORDINGS_MAX,
    KeyedNames,
    TouchRecording,
    TouchRecordings,
)
from kvfs.pool.rules.ranks import name_hash
from kvfs.storage.heat import Heat
from tests.support.store.heats import MIB, note, opened

NAMES = KeyedNames(b"key")


@pytest.fixture
def heat(tmp_path: Path) -> Iterator[Heat]:
    """The heat of an empty pool."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield opened(fd)
    os.close(fd)


def numbers(*hashes: int) -> list[int]:
    """What NAMES makes of names; ``note`` gives each block the hash that is its inode number."""
    return list(map(int, NAMES.numbers(np.array(hashes, np.uint32))))


def told(recording: TouchRecording) -> list[int]:
    """Return what was used since the last call."""
    used = recording.pop(BLOCKS_MAX)
    assert (used.lost, used.is_all) == (0, True)
    assert used.sizes_bytes.tolist() == [MIB] * len(used.numbers)
    return list(map(int, used.numbers))


def record(name: int) -> InodeRecord:
    """The record of a block with that number for its name."""
    return InodeRecord(
        mode=0o100644, uid=0, gid=0, state=2, size_bytes=3, allocated_bytes=MIB, atime_ns=0,
        mtime_ns=0, ctime_ns=0, btime_ns=0, parent=ROOT_INODE, entries=0, subdirs=0,
        sequence=Sequence(8), name=b"%d" % name,
    )  # fmt: skip


def test_uses_are_told_in_order_and_once(heat: Heat) -> None:
    note(heat, 20, 21, 22)
    recording = TouchRecording(heat, NAMES, 0.0)
    assert told(recording) == []
    for ino in (22, 20, 22, 99):  # the last is a directory
        heat.touch(InodeNo(ino))
    note(heat, 23)
    heat.run_due(1.0)
    heat.touch(InodeNo(21))
    assert told(recording) == numbers(20, 22, 23, 21)
    assert told(recording) == []
    heat.touch(InodeNo(21))
    assert told(recording) == numbers(21)


def test_rows_that_are_used_anew_and_rows_that_are_added_are_told(heat: Heat) -> None:
    note(heat, 20, 21)
    recording = TouchRecording(heat, NAMES, 0.0)
    heat.drop(InodeNo(20))
    note(heat, *range(30, 3000))
    assert told(recording) == numbers(*range(30, 3000))


def test_a_draft_is_told_when_it_is_stored(heat: Heat) -> None:
    """Whether it came before the recording, before the last look, or since."""
    note(heat, 20, rank=Rank.NEVER)
    recording = TouchRecording(heat, NAMES, 0.0)
    note(heat, 21, 22, rank=Rank.NEVER)
    note(heat, 23)
    assert told(recording) == numbers(23)
    heat.drop(InodeNo(22))
    note(heat, 22, rank=Rank.NEVER)
    note(heat, 24)
    note(heat, 21, 20)
    assert told(recording) == numbers(20, 21, 24)
    assert told(recording) == []
    note(heat, 22)
    assert told(recording) == numbers(22)


def test_what_goes_is_told_unless_it_was_told_or_never_stored(heat: Heat) -> None:
    recordings = TouchRecordings(heat, lambda: 0.0)
    assert not recordings.wanted
    note(heat, 19)
    recording = recordings.asked(recordings.begin(NAMES))
    assert recording is not None
    note(heat, 20, 22)
    note(heat, 21, 25, rank=Rank.NEVER)
    heat.touch(InodeNo(22))
    for ino in (20, 21, 19):
        recordings.went(InodeNo(ino), record(ino))
        heat.drop(InodeNo(ino))
    note(heat, 23)
    assert told(recording) == numbers(name_hash(record(20)), 22, 23)
    note(heat, 25)  # its draft was there before the last look
    recordings.went(InodeNo(25), record(25))
    heat.drop(InodeNo(25))
    recordings.went(InodeNo(23), record(23))
    assert told(recording) == numbers(name_hash(record(25)))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound on blocks that is reached soon."""
    bound = 1000
    monkeypatch.setattr("kvfs.pool.figures.touch_recordings.BLOCKS_MAX", bound)
    return bound


def test_of_a_flood_the_oldest_are_lost_and_counted(heat: Heat, few: int) -> None:
    recording = TouchRecording(heat, NAMES, 0.0)
    last = FIRST_INODE + few + 7
    note(heat, *range(FIRST_INODE, last))
    used = recording.pop(BLOCKS_MAX)
    assert (used.lost, used.is_all) == (7, True)
    assert used.numbers.tolist() == numbers(*range(last - few, last))
    assert told(recording) == []


def test_what_went_is_bounded_and_counted(heat: Heat, few: int) -> None:
    recording = TouchRecording(heat, NAMES, 0.0)
    for number in range(few + 5):
        note(heat, FIRST_INODE)
        recording.went(FIRST_INODE, record(number))
        heat.drop(FIRST_INODE)
    used = recording.pop(1)
    assert (used.lost, used.is_all) == (5, False)
    assert used.numbers.tolist() == numbers(name_hash(record(5)))
    used = recording.pop(BLOCKS_MAX)
    assert (used.lost, used.is_all, len(used.numbers)) == (0, True, few - 1)


def test_who_does_not_ask_has_ended(heat: Heat) -> None:
    now_s = 0.0
    recordings = TouchRecordings(heat, lambda: now_s)
    begun = [recordings.begin(NAMES) for _ in range(RECORDINGS_MAX)]
    with pytest.raises(SourceBusy, match="4 recordings"):
        recordings.begin(NAMES)
    now_s = IDLE_MAX_S
    assert recordings.asked(begun[0]) is not None
    recordings.run_due(now_s)
    recordings.run_due(now_s + 1.0)
    assert recordings.asked(begun[1]) is None
    assert recordings.wanted
    recordings.end(begun[0])
    recordings.end(begun[0])
    assert recordings.asked(begun[0]) is None
    assert not recordings.wanted


def test_numbers_follow_from_the_key_alone() -> None:
    hashes = np.arange(1 << 16, dtype=np.uint32) * np.uint32(40_503)
    found = NAMES.numbers(hashes)
    assert found.tolist() == KeyedNames(b"key").numbers(hashes).tolist()
    assert len(np.unique(found)) > len(hashes) - 10
    other = KeyedNames(b"kez").numbers(hashes)
    assert (found != other).mean() > 0.999
    assert len(np.unique(found ^ other)) > len(hashes) // 2
