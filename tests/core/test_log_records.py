"""Batches of the index's log, and the ends of its copies: whole, or nothing."""

import random
import struct
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.checksum import crc32c
from kvfs.core.log_records import (
    BATCH_HEAD_BYTES,
    COPY_END_BYTES,
    Batch,
    CopyEnd,
    Moment,
    batch_bytes,
    copy_end_bytes,
    pack_batch,
    parse_batch,
    parse_copy_end,
)
from kvfs.core.types import InodeNo

NUMBERS: Final = st.integers(0, (1 << 64) - 1)
INODES: Final = st.builds(InodeNo, NUMBERS)
MOMENTS: Final = st.builds(Moment, NUMBERS, INODES, st.lists(INODES, max_size=5).map(tuple))
ROWS: Final = st.dictionaries(
    st.binary(max_size=511), st.none() | st.binary(max_size=600), max_size=8
)


@given(MOMENTS, ROWS)
def test_a_batch_says_what_was_put_into_it(moment: Moment, rows: dict[bytes, bytes | None]) -> None:
    raw = pack_batch(moment, rows)
    assert batch_bytes(raw[:BATCH_HEAD_BYTES]) == len(raw)
    assert parse_batch(raw) == Batch(moment, rows)


def some_batch() -> bytes:
    return pack_batch(
        Moment(7, InodeNo(99), (InodeNo(3), InodeNo(4))), {b"key": b"value", b"gone": None}
    )


def test_a_batch_that_lacks_a_byte_or_has_another_is_none() -> None:
    raw = some_batch()
    for length in range(len(raw)):
        assert parse_batch(raw[:length]) is None
        assert parse_batch(raw[:length] + bytes(len(raw) - length)) in (None, parse_batch(raw))
    for at in range(len(raw)):
        for bit in range(8):
            other = bytearray(raw)
            other[at] ^= 1 << bit
            assert parse_batch(bytes(other)) is None
    assert parse_batch(raw + b"\0") is None


def test_no_bytes_end_it(random_bytes: list[bytes]) -> None:
    for raw in random_bytes:
        assert batch_bytes(raw) == 0 or len(raw) >= BATCH_HEAD_BYTES
        assert parse_batch(raw) is None


@pytest.fixture
def random_bytes() -> list[bytes]:
    """Bytes of all lengths, some of which begin as a batch does."""
    draw = random.Random(1)
    return [
        (b"KVLB" if draw.random() < 0.5 else b"") + draw.randbytes(draw.randrange(200))
        for _ in range(2000)
    ]


@given(MOMENTS, st.binary(max_size=100))
def test_the_end_of_a_copy_says_what_was_put_into_it(moment: Moment, data: bytes) -> None:
    end = CopyEnd(len(data), crc32c(data), moment)
    raw = end.pack()
    assert copy_end_bytes(raw[-COPY_END_BYTES:]) == len(raw)
    assert parse_copy_end(raw, len(data) + len(raw)) == end
    assert parse_copy_end(raw, len(data) + len(raw) + 1) is None


def test_the_end_of_a_copy_with_another_byte_is_none() -> None:
    raw = CopyEnd(5, 6, Moment(7, InodeNo(99), (InodeNo(3), InodeNo(4)))).pack()
    for at in range(len(raw)):
        other = bytearray(raw)
        other[at] ^= 1
        assert parse_copy_end(bytes(other), 5 + len(raw)) is None
    assert copy_end_bytes(b"") == 0
    assert copy_end_bytes(bytes(COPY_END_BYTES)) == 0


@pytest.mark.parametrize(
    "at", [24, 32, 36, 56, 58], ids=["body", "pending", "rows", "key", "value"]
)
def test_a_batch_that_says_another_length_under_a_right_checksum_is_none(at: int) -> None:
    """Whoever makes a pool to do harm computes the checksum, too."""
    raw = bytearray(pack_batch(Moment(1, InodeNo(9), (InodeNo(3), InodeNo(4))), {b"key": b"value"}))
    assert parse_batch(bytes(raw)) is not None
    raw[at] += 1
    raw[4:8] = crc32c(raw[8:]).to_bytes(4, "little")
    assert parse_batch(bytes(raw)) is None


def test_the_end_of_a_copy_that_says_more_inodes_under_a_right_checksum_is_none() -> None:
    raw = bytearray(CopyEnd(0, 0, Moment(7, InodeNo(9), (InodeNo(3), InodeNo(4)))).pack())
    raw[-12] += 1
    raw[-4:] = crc32c(raw[:-4]).to_bytes(4, "little")
    assert parse_copy_end(bytes(raw), len(raw)) is None


def test_a_length_that_nobody_writes_is_not_waited_for() -> None:
    """A start would take the memory for it."""
    head = bytearray(pack_batch(Moment(1, InodeNo(9), ()), {b"key": b"value"})[:BATCH_HEAD_BYTES])
    for body_bytes, whole_bytes in ((1 << 30, (1 << 30) + BATCH_HEAD_BYTES), ((1 << 30) + 1, 0)):
        struct.pack_into("<Q", head, 24, body_bytes)
        assert batch_bytes(bytes(head)) == whole_bytes
    tail = bytearray(CopyEnd(0, 0, Moment(7, InodeNo(9), ())).pack())
    for count, whole_bytes in ((1 << 22, (8 << 22) + COPY_END_BYTES), ((1 << 22) + 1, 0)):
        struct.pack_into("<Q", tail, len(tail) - 12, count)
        assert copy_end_bytes(bytes(tail)) == whole_bytes
