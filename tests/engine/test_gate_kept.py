"""What the gate learned outlives a start: kept in HEAT, with what is damaged or odd ignored."""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.admission import MountedGate
from kvfs.core.checksum import CRC, crc32c
from kvfs.core.eviction_policy import Lru
from kvfs.core.learned import Learned
from kvfs.core.pool_layout import HEAT
from kvfs.core.types import InodeNo
from kvfs.storage import heat_file
from kvfs.storage.heat import Heat
from kvfs.storage.syscalls import Syscalls
from tests.support.store.heats import EPOCH, NOW_S, note

#: Blocks of the pool; half of them are asked for again and again, and names that nobody has twice.
BLOCKS: Final = 200
ONCE: Final = 3000
_FIRST_VERSION: Final = struct.pack("<8sI", b"KVFSHEAT", 1)
_SECOND_VERSION: Final = struct.pack("<8sI", b"KVFSHEAT", 2)
_HEAD_BYTES: Final = 40
_ROW_BYTES: Final = 31


@pytest.fixture
def pool_fd(tmp_path: Path) -> Iterator[int]:
    """A pool directory without anything in it."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def gated(pool_fd: int) -> tuple[Heat, MountedGate]:
    """Return the heat of a pool whose policy is the gate, as a start finds it."""
    gate = MountedGate()
    heat = Heat([pool_fd], Syscalls(), epoch=EPOCH, read_only=False, policy=gate, now_s=NOW_S)
    return heat, gate


def name_of(number: int) -> int:
    return (number * 2_654_435_761 + 7) % 2**32


def teach(gate: MountedGate, first: int = 0) -> None:
    """Let it see a few names often, and many once."""
    for at in range(first, first + ONCE):
        gate.judge([name_of(at % (BLOCKS // 2)), name_of(BLOCKS + at)], [0, 0])


def learned_pool(pool_fd: int) -> tuple[Heat, MountedGate]:
    """Return a pool whose gate has learned; nothing is saved yet."""
    heat, gate = gated(pool_fd)
    note(heat, *range(20, 20 + BLOCKS))
    gate.resize(len(heat))
    teach(gate)
    assert gate.threshold > 0
    assert gate.known[0] >= 2
    return heat, gate


def told(gate: MountedGate) -> Learned:
    """Return what it knows, as a save has it."""
    counts, tables = gate.learned()
    return Learned(counts, tuple(map(bytes, tables)))


def is_new(gate: MountedGate) -> bool:
    return told(gate) == told(MountedGate())


def test_a_stop_keeps_all(pool_fd: int) -> None:
    heat, gate = learned_pool(pool_fd)
    heat.save()
    teach(gate, ONCE)
    heat.save(at_stop=True)
    _, after = gated(pool_fd)
    assert told(after) == told(gate)
    assert (after.known, after.threshold) == (gate.known, gate.threshold)
    bursts = [[name_of(at), name_of(at + 9_000)] for at in range(50)]
    verdicts = [[one.judge(burst, [0, 0]) for burst in bursts] for one in (gate, after)]
    assert verdicts[0] == verdicts[1]


def test_what_comes_after_a_start_is_counted_on(pool_fd: int) -> None:
    heat, gate = learned_pool(pool_fd)
    heat.save(at_stop=True)
    _, after = gated(pool_fd)
    for one in (gate, after):
        teach(one, ONCE)
    assert after.learned().tables == gate.learned().tables
    assert after.known == pytest.approx(gate.known)
    assert after.threshold == gate.threshold, "the miniature caches were empty, and not far off"


def test_a_kill_keeps_the_rates_of_the_last_save(pool_fd: int, tmp_path: Path) -> None:
    heat, gate = learned_pool(pool_fd)
    heat.save()
    whole_bytes = (tmp_path / HEAT).stat().st_size
    tables = told(gate).tables
    teach(gate, ONCE)
    heat.run_due(1.0)
    heat.touch(InodeNo(20))
    saved = told(gate)
    heat.save()
    assert (tmp_path / HEAT).stat().st_size - whole_bytes < 4096, "no tables"
    teach(gate, 2 * ONCE)  # of which nothing is saved
    again, after = gated(pool_fd)
    assert told(after) == Learned(saved.counts, tables)
    again.run_due(2.0)
    again.touch(InodeNo(21))
    again.save()
    assert told(gated(pool_fd)[1]) == told(after)


def test_what_is_kept_is_bounded() -> None:
    gate = MountedGate()
    gate.resize(100_000)
    for at in range(40_000):
        touches = [at % 5] * (at % 70)
        gate.judge([name_of(at * 70 + number) for number in range(at % 70)], touches)
        if at == 3_000:
            break
    counts, tables = gate.learned()
    assert len(counts) < 20 << 10
    assert sum(memoryview(table).nbytes for table in tables) <= 20 * 100_000 + (1 << 20)


def test_too_much_is_not_kept(pool_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heat, gate = learned_pool(pool_fd)
    monkeypatch.setattr(heat_file, "LEARNED_MAX_BYTES", len(told(gate).counts) + 1)
    heat.save()
    _, after = gated(pool_fd)
    assert after.known == gate.known
    assert after.learned().tables != gate.learned().tables
    monkeypatch.setattr(heat_file, "LEARNED_MAX_BYTES", len(told(gate).counts) - 1)
    cold, after = gated(pool_fd)
    assert is_new(after)
    assert len(cold) == 0


def test_a_file_of_the_version_before_is_read(pool_fd: int, tmp_path: Path) -> None:
    """And a policy that keeps nothing writes that version, which earlier versions read."""
    heat = Heat([pool_fd], Syscalls(), epoch=EPOCH, read_only=False, policy=Lru(), now_s=NOW_S)
    note(heat, 20, 21)
    heat.save(at_stop=True)
    assert (tmp_path / HEAT).read_bytes().startswith(_FIRST_VERSION)
    again, gate = gated(pool_fd)
    assert len(again) == 2
    assert is_new(gate)
    gate.resize(2)
    teach(gate)
    again.run_due(1.0)
    again.touch(InodeNo(20))
    again.save()  # behind a section of that version
    rows, after = gated(pool_fd)
    assert len(rows) == 2
    assert after.known == gate.known
    again.save(at_stop=True)
    assert (tmp_path / HEAT).read_bytes().startswith(_SECOND_VERSION)
    assert told(gated(pool_fd)[1]) == told(gate)


def test_another_policy_leaves_it(pool_fd: int) -> None:
    heat, _ = learned_pool(pool_fd)
    heat.save()
    other = Heat([pool_fd], Syscalls(), epoch=EPOCH, read_only=False, policy=Lru(), now_s=NOW_S)
    assert len(other) == BLOCKS
    other.run_due(1.0)
    other.touch(InodeNo(20))
    other.save()
    rows, gate = gated(pool_fd)
    assert len(rows) == BLOCKS
    assert is_new(gate), "it would be old"


@pytest.mark.parametrize("left", [1, 40, 4000])
def test_a_torn_save_goes_on_with_the_one_before(pool_fd: int, tmp_path: Path, left: int) -> None:
    heat, gate = learned_pool(pool_fd)
    heat.save()
    before = told(gate)
    whole_bytes = (tmp_path / HEAT).stat().st_size
    teach(gate, ONCE)
    heat.run_due(1.0)
    heat.touch(InodeNo(20))
    heat.save()
    torn_bytes = max(whole_bytes, (tmp_path / HEAT).stat().st_size - left)
    os.truncate(tmp_path / HEAT, torn_bytes)
    rows, after = gated(pool_fd)
    assert len(rows) == BLOCKS
    assert told(after) == before


def with_counts(raw: bytes, change: Callable[[bytearray, int], object]) -> bytes:
    """Return the section *raw* with its counts changed, and right checksums."""
    data = bytearray(raw)
    count, marks = struct.unpack_from("<Q", data, 24)[0], struct.unpack_from("<I", data, 12)[0]
    change(data, _HEAD_BYTES + count * _ROW_BYTES + marks * 16 + 16)
    struct.pack_into("<I", data, 32, crc32c(data[_HEAD_BYTES:]))
    data[36:_HEAD_BYTES] = CRC.pack(crc32c(data[:36]))
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (0, "<I", 2),  # another version
        (4, "<I", 9),  # no threshold
        (8, "<Q", BLOCKS * 4),  # a pool of another size
        (8, "<Q", 1 << 60),
        (16, "<Q", 1 << 62),  # accesses
        (24, "<Q", 1 << 61),  # scaled later than now
        (32, "<d", float("nan")),  # the share written
        (32, "<d", 2.0),
        (40, "<d", float("nan")),  # the price
        (56, "<d", float("inf")),  # a gain
        (128, "<H", 1024),  # no class
        (130, "<d", -1.0),  # seen
        (138, "<d", float("inf")),  # came back
    ],
)
def test_what_cannot_be_is_ignored_and_the_rows_are_not(
    pool_fd: int, tmp_path: Path, at: int, form: str, value: float
) -> None:
    heat, _ = learned_pool(pool_fd)
    heat.save()
    raw = (tmp_path / HEAT).read_bytes()
    changed = with_counts(raw, lambda data, start: struct.pack_into(form, data, start + at, value))
    (tmp_path / HEAT).write_bytes(changed)
    rows, after = gated(pool_fd)
    assert len(rows) == BLOCKS
    assert is_new(after)
    (tmp_path / HEAT).write_bytes(with_counts(raw, lambda *_: None))
    assert not is_new(gated(pool_fd)[1])


def test_counts_that_are_cut_are_ignored() -> None:
    gate = MountedGate()
    gate.resize(BLOCKS)
    teach(gate)
    counts, tables = told(gate)
    for end in (0, 1, len(counts) - 1):
        after = MountedGate()
        after.recall(Learned(counts[:end], tables), BLOCKS)
        assert is_new(after)
    after = MountedGate()
    after.recall(Learned(counts, tables[:1]), BLOCKS)
    assert after.known == gate.known
    assert after.learned().tables != gate.learned().tables, "tables of another size"


def test_a_damaged_byte_costs_the_file(pool_fd: int, tmp_path: Path) -> None:
    heat, _ = learned_pool(pool_fd)
    heat.save()
    raw = bytearray((tmp_path / HEAT).read_bytes())
    raw[-1] ^= 1
    (tmp_path / HEAT).write_bytes(raw)
    rows, after = gated(pool_fd)
    assert len(rows) == 0
    assert is_new(after)
