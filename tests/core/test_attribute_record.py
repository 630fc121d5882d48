"""Attribute records: what is packed comes back, and damage is never a value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.checksum import CRC, crc32c
from kvfs.core.errors import Damaged
from kvfs.core.records import AttributeRecord, counting, pack_attributes, parse_attributes
from kvfs.core.types import InodeNo, Sequence

NUMBERS = st.integers(0, 2**64 - 1)
RECORDS = st.builds(
    AttributeRecord,
    NUMBERS.map(InodeNo),
    NUMBERS.map(Sequence),
    st.dictionaries(st.binary(min_size=1, max_size=255), st.binary(max_size=300), max_size=5),
)
ONE = AttributeRecord(InodeNo(17), Sequence(42), {b"user.k": b"v", b"user.kvfs.pin": b"1"})


@given(RECORDS)
def test_a_record_comes_back(record: AttributeRecord) -> None:
    assert parse_attributes(pack_attributes(record)) == record


@given(st.data())
def test_a_flipped_bit_or_a_lost_byte_is_damage(data: st.DataObject) -> None:
    raw = bytearray(pack_attributes(ONE))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(raw), pack_attributes(ONE)[: data.draw(st.integers(0, len(raw) - 1))]):
        with pytest.raises(Damaged):
            parse_attributes(bad)


@given(st.binary(max_size=80))
def test_garbage_with_a_right_checksum_is_refused_or_parsed_whole(body: bytes) -> None:
    try:
        record = parse_attributes(body + CRC.pack(crc32c(body)))
    except Damaged:
        return
    assert len(pack_attributes(record)) <= len(body) + 4


def test_the_identity_says_which_of_two_counts() -> None:
    newer = ONE._replace(sequence=Sequence(50))
    assert counting([ONE, newer], Sequence(49)) is ONE
    assert counting([ONE, newer], Sequence(50)) is newer
    assert counting([newer, None], Sequence(41)) is None
    assert counting([ONE, newer], None) is newer  # no identity: it is a draft


def test_the_documents_worked_example_is_what_the_code_writes() -> None:
    record = AttributeRecord(InodeNo(0x1234), Sequence(42), {b"user.kvfs.pin": b"1"})
    assert pack_attributes(record).hex() == (
        "01000000010000003412000000000000" "2a00000000000000"
        "0d0001000000" + b"user.kvfs.pin1".hex() + pack_attributes(record)[-4:].hex()
    )  # fmt: skip
