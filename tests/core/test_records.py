"""Records: what goes in comes out, and what is not whole never does."""

import re
import struct
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core import records
from kvfs.core.checksum import crc32c
from kvfs.core.errors import Damaged
from kvfs.core.lifecycle import State
from kvfs.core.records import Counters, Identity
from kvfs.core.types import (
    FIRST_INODE,
    NAME_MAX_BYTES,
    TARGET_MAX_BYTES,
    InodeNo,
    InodeRecord,
    Sequence,
)

u16, u32, u63, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 63, 64))
states = st.sampled_from(State).map(int)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
inos = u64.map(InodeNo)
names = st.binary(max_size=NAME_MAX_BYTES)
real_names = names.filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
inode_records = st.builds(
    InodeRecord,
    mode=u32, uid=u32, gid=u32, state=states, size_bytes=u63, allocated_bytes=u63,
    atime_ns=i64, mtime_ns=i64, ctime_ns=i64, btime_ns=i64, parent=inos, entries=u64,
    subdirs=u32, sequence=u63.map(Sequence), name=names,
    target=st.binary(max_size=TARGET_MAX_BYTES), maker_tgid=u32, maker_birth=u64,
)  # fmt: skip
identities = st.builds(
    Identity, ino=inos, parent=inos, sequence=u63.map(Sequence), mode=u32, uid=u32, gid=u32,
    size_bytes=u63, mtime_ns=i64, flags=u32, content_crc=u32, name=real_names,
)  # fmt: skip

# The values of the worked example in docs/dev/format.md.
BLOCK: Final = InodeRecord(
    mode=0o100644, uid=1000, gid=1000, state=2, size_bytes=33_554_432, allocated_bytes=33_554_432,
    atime_ns=1_790_000_000_000_000_001, mtime_ns=1_790_000_000_000_000_002,
    ctime_ns=1_790_000_000_000_000_003, btime_ns=1_790_000_000_000_000_000,
    parent=InodeNo(17), entries=0, subdirs=0, sequence=Sequence(42), name=b"block.data",
)  # fmt: skip
BLOCK_INO: Final = InodeNo(0x1234)
INODES_END: Final = (FIRST_INODE + 65_536).to_bytes(8, "little")
IDENTITY: Final = Identity(
    ino=BLOCK_INO, parent=BLOCK.parent, sequence=BLOCK.sequence, mode=BLOCK.mode, uid=BLOCK.uid,
    gid=BLOCK.gid, size_bytes=BLOCK.size_bytes, mtime_ns=BLOCK.mtime_ns, flags=4,
    content_crc=0x76543210, name=BLOCK.name,
)  # fmt: skip


def flipped(raw: bytes, bit: int) -> bytes:
    """Return *raw* with one bit changed."""
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(inode_records)
def test_an_inode_record_comes_back(record: InodeRecord) -> None:
    parsed = records.parse_inode(records.pack_inode(record))
    assert parsed == record
    assert type(parsed) is InodeRecord


@given(inode_records, st.data())
def test_one_flipped_bit_or_a_lost_byte_is_damage(record: InodeRecord, data: st.DataObject) -> None:
    raw = records.pack_inode(record)
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    with pytest.raises(Damaged):
        records.parse_inode(flipped(raw, bit))
    with pytest.raises(Damaged):
        records.parse_inode(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(st.binary(max_size=200))
def test_garbage_with_a_right_checksum_is_still_refused_or_parsed_whole(body: bytes) -> None:
    raw = body + crc32c(body).to_bytes(4, "little")
    try:
        record = records.parse_inode(raw)
    except Damaged:
        return
    assert records.parse_inode(records.pack_inode(record)) == record


def test_an_inode_record_of_another_version_is_damage() -> None:
    body = b"\x02" + records.pack_inode(BLOCK)[1:-4]
    with pytest.raises(Damaged, match="version 2"):
        records.parse_inode(body + crc32c(body).to_bytes(4, "little"))


def test_a_name_length_beyond_the_record_is_damage() -> None:
    body = bytearray(records.pack_inode(BLOCK)[:-4])
    body[2:4] = (200).to_bytes(2, "little")
    with pytest.raises(Damaged, match="name of 200"):
        records.parse_inode(bytes(body) + crc32c(body).to_bytes(4, "little"))


def test_a_field_beyond_its_width_is_refused_not_cut() -> None:
    with pytest.raises(struct.error):
        records.pack_inode(BLOCK._replace(size_bytes=1 << 64))


@given(inos, inos, names)
def test_keys_come_back(parent: InodeNo, ino: InodeNo, name: bytes) -> None:
    assert records.parse_inode_key(records.inode_key(ino)) == ino
    assert records.parse_name_key(records.name_key(parent, name)) == (parent, name)
    assert records.parse_child_key(records.child_key(parent, ino)) == (parent, ino)
    assert records.parse_xattr_key(records.xattr_key(ino, name)) == (ino, name)


@given(st.tuples(inos, inos), st.tuples(inos, inos))
def test_keys_sort_as_their_numbers(
    one: tuple[InodeNo, InodeNo], other: tuple[InodeNo, InodeNo]
) -> None:
    assert (records.child_key(*one) < records.child_key(*other)) == (one < other)
    assert (records.inode_key(one[0]) < records.inode_key(other[0])) == (one[0] < other[0])


def test_inodes_sort_after_everything_else() -> None:
    high = InodeNo((1 << 64) - 1)
    others = [
        records.name_key(high, b"\xff" * NAME_MAX_BYTES),
        records.child_key(high, high),
        records.xattr_key(high, b"\xff" * NAME_MAX_BYTES),
        records.FORMAT_KEY,
        records.COUNTERS_KEY,
    ]
    assert max(others) < records.inode_key(InodeNo(0))


@pytest.mark.parametrize("key", [b"", b"\x09" * 17, b"\x02" * 8, b"\x02" * 18])
def test_a_foreign_key_is_damage(key: bytes) -> None:
    with pytest.raises(Damaged):
        records.parse_child_key(key)
    with pytest.raises(Damaged):
        records.parse_inode_key(key)


@given(inos, inos, names)
def test_a_name_row_is_bound_to_its_key(parent: InodeNo, ino: InodeNo, name: bytes) -> None:
    key = records.name_key(parent, name)
    raw = records.pack_name(key, ino)
    assert records.parse_name(key, raw) == ino
    with pytest.raises(Damaged):
        records.parse_name(key + b"x", raw)
    with pytest.raises(Damaged):
        records.parse_name(key, raw[:-1])


@given(names, st.binary(max_size=300))
def test_a_sealed_value_is_bound_to_its_key(key: bytes, value: bytes) -> None:
    raw = records.seal(key, value)
    assert records.unseal(key, raw) == value
    with pytest.raises(Damaged):
        records.unseal(key + b"x", raw)
    with pytest.raises(Damaged):
        records.unseal(key, flipped(raw, len(raw) * 8 - 1))


def test_an_empty_row_is_damage() -> None:
    with pytest.raises(Damaged):
        records.unseal(b"key", b"")
    with pytest.raises(Damaged):
        records.parse_name(b"key", b"")
    with pytest.raises(Damaged):
        records.parse_inode(b"")


@given(st.builds(Counters, *[u63] * len(Counters._fields)))
def test_counters_come_back(counters: Counters) -> None:
    raw = records.pack_counters(counters)
    assert records.parse_counters(raw) == counters
    with pytest.raises(Damaged):
        records.parse_counters(flipped(raw, 77))


def test_the_format_version_comes_back_and_is_guarded() -> None:
    assert records.parse_format(records.pack_format(7)) == 7
    with pytest.raises(Damaged):
        records.parse_format(flipped(records.pack_format(7), 0))
    with pytest.raises(Damaged):
        records.parse_format(b"")


@given(identities, st.binary(max_size=60))
def test_an_identity_comes_back_and_fits_two_small_xattrs(
    identity: Identity, content: bytes
) -> None:
    fixed, name = records.pack_identity(identity, content)
    assert records.parse_identity(fixed, name, content) == identity
    assert len(fixed) <= 255 >= len(name)


@given(identities)
def test_an_identity_holds_only_with_its_own_name_and_content(identity: Identity) -> None:
    fixed, name = records.pack_identity(identity, b"target")
    for other_fixed, other_name, content in (
        (fixed, name + b"x", b"target"),
        (fixed, name, b"targex"),
        (fixed, name, b"\0" * 6),
        (flipped(fixed, 100), name, b"target"),
        (fixed[:-1], name, b"target"),
        (b"", name, b"target"),
    ):
        with pytest.raises(Damaged):
            records.parse_identity(other_fixed, other_name, content)


def test_an_identity_of_another_version_is_damage() -> None:
    fixed, name = records.pack_identity(IDENTITY)
    body = b"\x02" + fixed[1:-4]
    with pytest.raises(Damaged, match="version 2"):
        records.parse_identity(body + crc32c(body + name).to_bytes(4, "little"), name)


def dumps_in_the_document() -> dict[str, bytes]:
    """Return the worked examples of docs/dev/format.md: label -> bytes of its hex dump."""
    text = (Path(__file__).parents[2] / "docs/dev/format.md").read_text()
    found: dict[str, bytes] = {}
    pattern = r"^`([\w ]+)`:\n\n((?:    [0-9a-f]{4}  .*\n)+)"
    for label, dump in re.findall(pattern, text, re.MULTILINE):
        found[label] = b"".join(
            bytes.fromhex(line.split("  |")[0].strip()[4:]) for line in dump.splitlines()
        )
    return found


def test_the_documents_worked_example_is_what_the_code_writes() -> None:
    name = records.name_key(BLOCK.parent, BLOCK.name)
    child = records.child_key(BLOCK.parent, BLOCK_INO)
    fixed, raw_name = records.pack_identity(IDENTITY)
    dumps = dumps_in_the_document()
    del dumps["HEAT"]  # tests/engine/test_heat.py
    assert dumps == {
        "inode key": records.inode_key(BLOCK_INO),
        "inode record": records.pack_inode(BLOCK),
        "name key": name,
        "name row": records.pack_name(name, BLOCK_INO),
        "child key": child,
        "child row": records.seal(child, BLOCK.name),
        "counters row": records.pack_counters(Counters(1, 33_554_432, 2, 0, 0, 42)),
        "format row": records.pack_format(records.INDEX_FORMAT),
        "identity fixed": fixed,
        "identity name": raw_name,
        "INODES": INODES_END + crc32c(INODES_END).to_bytes(4, "little"),
    }


def test_the_documents_widths_are_the_codes() -> None:
    assert len(records.pack_inode(BLOCK._replace(name=b""))) == 112
    assert len(records.pack_identity(IDENTITY)[0]) == 68
    assert len(records.pack_counters(Counters())) == 60


@pytest.mark.parametrize(("count", "listed"), [(0, True), (256, True), (257, False)])
def test_so_many_unfinished_inodes_are_listed_and_no_more(count: int, listed: bool) -> None:
    inos = [InodeNo(100 + number) for number in range(count)]
    raw = records.pack_unfinished(inos)
    assert records.parse_unfinished(raw) == (inos if listed else None)
    assert len(raw) < 2100
