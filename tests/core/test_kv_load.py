"""The KV-shaped load notices everything that a cache may not do."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvfs.bench.kv_load import ABSENT_PER_BLOCK, KvLoad, Moved, Span
from kvfs.bench.kv_shapes import (
    SHAPES,
    KvBlock,
    KvContent,
    KvShape,
    Layout,
    absent_blocks,
    aligned_buffer,
    first_difference,
    name_block,
)
from kvfs.core.errors import VerifyFailed
from kvfs.core.types import NAME_MAX_BYTES, PAGE_BYTES
from tests.support.mounts.mounting import workplace

SMALL_BYTES = 24 << 20


@pytest.fixture(scope="module")
def memory_root() -> Iterator[Path]:
    with workplace() as directory:
        yield directory


@pytest.fixture
def root(memory_root: Path, request: pytest.FixtureRequest) -> Path:
    directory = memory_root / re.sub(r"\W", "-", request.node.name)
    directory.mkdir()
    return directory


def stored_load(root: Path) -> tuple[KvLoad, list[KvBlock]]:
    load = KvLoad(root, total_bytes=SMALL_BYTES, progress=print)
    load.store()
    return load, list(load.blocks)


def flip(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))


def test_everything_stored_is_found_again_and_checked_twice(root: Path) -> None:
    moved_bytes: list[int] = []
    load = KvLoad(root, total_bytes=SMALL_BYTES, progress=moved_bytes.append)
    load.store()
    load.load()
    total = load.report.total()
    passes = 2 if load.direct else 1
    assert total.blocks == len(list(load.blocks))
    assert total.stored.bytes == load.bytes
    assert total.verified_bytes == passes * load.bytes
    assert total.hits == passes * total.blocks
    assert total.misses == (1 + ABSENT_PER_BLOCK) * total.blocks
    assert sum(moved_bytes) == (1 + passes) * load.bytes


def test_no_temporary_file_stays(root: Path) -> None:
    load, blocks = stored_load(root)
    files = {Path(at) / name for at, _, names in os.walk(root) for name in names}
    assert files == {load.path(block) for block in blocks}


def test_a_later_process_checks_what_an_earlier_one_stored(root: Path) -> None:
    stored_load(root)
    later = KvLoad(root, total_bytes=SMALL_BYTES, progress=print)
    later.load()
    assert later.report.total().verified_bytes >= later.bytes


def test_what_is_there_is_not_stored_again(root: Path) -> None:
    stored_load(root)
    again, blocks = stored_load(root)
    assert again.report.total().stored.bytes == 0
    assert again.report.total().hits == len(blocks)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_one_wrong_byte_is_named_with_file_and_offset(root: Path, shape: KvShape) -> None:
    load, blocks = stored_load(root)
    victim = next(block for block in blocks if block.shape == shape)
    offset_bytes = victim.shape.size_bytes - 1
    flip(load.path(victim), offset_bytes)
    with pytest.raises(VerifyFailed, match=f"wrong byte at offset {offset_bytes}: ") as raised:
        load.load()
    assert str(load.path(victim)) in str(raised.value)


def test_another_blocks_bytes_are_wrong_bytes(root: Path) -> None:
    load, blocks = stored_load(root)
    load.path(blocks[0]).write_bytes(load.path(blocks[1]).read_bytes())
    with pytest.raises(VerifyFailed, match="wrong byte at offset"):
        load.load()


def test_a_short_block_is_an_error(root: Path) -> None:
    load, blocks = stored_load(root)
    os.truncate(load.path(blocks[0]), blocks[0].shape.size_bytes - 1)
    with pytest.raises(VerifyFailed, match="were stored"):
        load.load()


def test_a_lost_block_is_an_error(root: Path) -> None:
    load, blocks = stored_load(root)
    load.path(blocks[-1]).unlink()
    with pytest.raises(VerifyFailed, match="is missing"):
        load.load()


def test_a_yes_for_what_was_never_stored_is_an_error(root: Path) -> None:
    load = KvLoad(root, total_bytes=SMALL_BYTES, progress=print)
    never = load.path(next(absent_blocks(next(iter(load.blocks)), 1)))
    never.parent.mkdir(parents=True)
    never.touch()
    with pytest.raises(VerifyFailed, match="never stored"):
        load.store()


def test_content_differs_between_blocks_and_seeds() -> None:
    room = aligned_buffer(PAGE_BYTES)
    first = KvContent(0, PAGE_BYTES).fill(1, room, 100).copy()
    assert not np.array_equal(first, KvContent(0, PAGE_BYTES).fill(2, room, 100))
    assert not np.array_equal(first, KvContent(1, PAGE_BYTES).fill(1, room, 100))
    assert np.array_equal(first, KvContent(0, PAGE_BYTES).fill(1, room, 100))


@pytest.mark.parametrize(
    ("expected", "found", "offset_bytes"),
    [
        (b"abc", b"abc", None),
        (b"abc", b"abx", 2),
        (b"abc", b"xbx", 0),
        (b"abc", b"ab", 2),
        (b"ab", b"abc", 2),
        (b"", b"", None),
        (b"", b"a", 0),
    ],
)
def test_the_first_difference(expected: bytes, found: bytes, offset_bytes: int | None) -> None:
    arrays = [np.frombuffer(data, dtype=np.uint8) for data in (expected, found)]
    assert first_difference(*arrays) == offset_bytes


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_names_are_legal_and_distinct(shape: KvShape) -> None:
    blocks = [name_block(found, str(n)) for found in SHAPES if found == shape for n in range(50)]
    parts = [part for block in blocks for part in f"{block.path}/{block.draft}".split("/")]
    assert max(len(part.encode()) for part in parts) <= NAME_MAX_BYTES
    assert len({block.path for block in blocks} | {block.draft for block in blocks}) == 100
    assert len({block.key for block in blocks}) == 50


def test_every_layout_is_in_use() -> None:
    assert {shape.layout for shape in SHAPES} == set(Layout)


def test_time_is_counted_once_where_threads_overlap() -> None:
    moved = Moved(6_000_000_000, [Span(1.0, 3.0), Span(2.0, 4.0), Span(6.0, 7.0), Span(6.2, 6.5)])
    assert moved.busy_s() == pytest.approx(4.0)
    assert moved.rate() == pytest.approx(1.5)
    assert Moved().rate() == 0.0
