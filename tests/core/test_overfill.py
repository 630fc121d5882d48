"""The load that stores more than there is room for counts what happened, and nothing else."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfs.bench.killed_writers import halves_left
from kvfs.bench.overfill import (
    BLOCK_BYTES,
    PROMPT_BLOCKS,
    PROMPT_BYTES,
    TIMES,
    Overfill,
    requests_for,
)
from kvfs.core.errors import VerifyFailed
from tests.support.mounts.mounting import mounted_at, skip_without_mounts, workplace

ROOM_BYTES = 4 * PROMPT_BYTES


@pytest.fixture
def root() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


def nothing(_number: int, _total: int, _share: float) -> None:
    """What is done on the way."""


def test_each_side_gets_the_same_requests() -> None:
    requests = requests_for(ROOM_BYTES, 1)
    assert requests == requests_for(ROOM_BYTES, 1) != requests_for(ROOM_BYTES, 2)
    assert len(requests) * PROMPT_BYTES == TIMES * ROOM_BYTES
    assert all(0 <= each.asked < each.new for each in requests)
    assert all(each.asked in (0, *range(each.new - 4, each.new)) for each in requests)


def test_with_room_everything_is_found(root: Path) -> None:
    seen = list[tuple[int, int, float]]()
    load = Overfill(root, ROOM_BYTES, seed=0, progress=lambda *step: seen.append(step))
    load.run()
    counts = load.counts
    prompts = len(requests_for(ROOM_BYTES, 0))
    assert [number for number, _, _ in seen] == list(range(1, prompts + 1))
    assert seen[-1][2] == 1.0
    assert (counts.refused, counts.lost) == (0, 0)
    assert counts.asked == prompts * PROMPT_BLOCKS
    # A prompt that another thread is storing just now may not be there yet.
    assert counts.found >= counts.asked / 2
    assert len(list(root.iterdir())) == (prompts + 1) * PROMPT_BLOCKS
    assert {file.stat().st_size for file in root.iterdir()} == {BLOCK_BYTES}


@pytest.mark.needs_fuse
def test_what_a_full_file_system_refuses_is_counted(root: Path) -> None:
    skip_without_mounts()
    with mounted_at(root / "small", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "kvfs-test") as at:
        load = Overfill(at, ROOM_BYTES, seed=0, progress=nothing)
        load.run()
        held = [file for file in at.iterdir() if file.suffix == ".kv"]
    assert load.counts.stored == len(held) <= ROOM_BYTES // BLOCK_BYTES
    assert load.counts.refused > ROOM_BYTES // BLOCK_BYTES


def test_a_wrong_byte_ends_it(root: Path) -> None:
    Overfill(root, ROOM_BYTES, seed=0, progress=nothing).run()
    for file in root.iterdir():
        with file.open("r+b") as block:
            block.seek(BLOCK_BYTES - 1)
            block.write(b"x")
    with pytest.raises(VerifyFailed, match="not what was stored at offset"):
        Overfill(root, ROOM_BYTES, seed=0, progress=nothing).run()


def test_what_is_told_on_the_way_ends_it(root: Path) -> None:
    def interrupted(_number: int, _total: int, _share: float) -> None:
        raise KeyboardInterrupt

    load = Overfill(root, ROOM_BYTES, seed=0, progress=interrupted)
    with pytest.raises(KeyboardInterrupt):
        load.run()
    assert not list(root.glob("*.tmp"))


def test_a_plain_directory_keeps_the_halves_of_killed_writers(root: Path) -> None:
    files = [root / "block.kv", root / "missing" / "block.kv", root / "block.tmp"]
    assert halves_left(files, 1 << 20) == [files[0], files[2]]
    assert files[0].stat().st_size == 1 << 20


def test_on_a_slow_disk_less_is_stored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments_s = itertools.count(0.0, 10.0)
    clock = SimpleNamespace(monotonic=lambda: next(moments_s))
    monkeypatch.setattr("kvfs.bench.overfill.time", clock)
    seen: list[int] = []
    load = Overfill(root, ROOM_BYTES, seed=0, progress=lambda *step: seen.append(step[0]))
    load.run()
    assert seen == [1, 2, 3]
