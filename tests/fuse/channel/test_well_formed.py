"""What libfuse may be given, and what it would read past."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mount.fuse.libfuse_pair import REQUEST_SHAPES, well_formed
from mount.fuse.wire import TRANSFER_MAX_BYTES, Opcode

NAMED = [opcode for opcode, shape in REQUEST_SHAPES.items() if shape.names]
names = st.binary(min_size=1, max_size=300).filter(lambda name: b"\0" not in name)


def whole(opcode: int, texts: list[bytes]) -> bytes:
    """Return the shortest body of *opcode*, with *texts* as its names."""
    shape = REQUEST_SHAPES[opcode]
    return bytes(shape.fixed_bytes) + b"".join(text + b"\0" for text in texts[: shape.names])


@pytest.mark.parametrize("opcode", REQUEST_SHAPES, ids=lambda code: Opcode(code).name)
def test_a_whole_body_may_pass_and_every_shorter_one_not(opcode: int) -> None:
    body = whole(opcode, [b"one", b"two"])
    assert well_formed(opcode, memoryview(body))
    assert well_formed(opcode, memoryview(body + b"more")) == (opcode != Opcode.WRITE)
    for length in range(len(body)):
        assert not well_formed(opcode, memoryview(body)[:length])


@pytest.mark.parametrize("opcode", sorted({*range(64)} - REQUEST_SHAPES.keys()))
def test_libfuse_is_given_no_other_kind(opcode: int) -> None:
    assert not well_formed(opcode, memoryview(bytes(100)))


@given(st.sampled_from(NAMED), st.lists(names, min_size=2, max_size=2))
def test_names_may_be_anything_but_open_ended(opcode: int, texts: list[bytes]) -> None:
    body = whole(opcode, texts)
    assert well_formed(opcode, memoryview(body))
    assert not well_formed(opcode, memoryview(body[:-1]))


@given(st.integers(0, 1 << 21), st.integers(0, 64))
def test_a_write_holds_the_bytes_it_announces_and_no_more(size_bytes: int, held_bytes: int) -> None:
    body = struct.pack("<QQIIQII", 1, 0, size_bytes, 0, 0, 0, 0) + bytes(held_bytes)
    assert well_formed(Opcode.WRITE, memoryview(body)) == (held_bytes == size_bytes)


@given(st.integers(0, 64), st.integers(0, 64), names)
def test_an_attribute_holds_the_value_it_announces(
    size_bytes: int, held_bytes: int, name: bytes
) -> None:
    body = struct.pack("<II", size_bytes, 0) + name + b"\0" + bytes(held_bytes)
    assert well_formed(Opcode.SETXATTR, memoryview(body)) == (held_bytes >= size_bytes)


@pytest.mark.parametrize(("flags", "known"), [(0, True), (1, True), (2, True), (4, False)])
def test_an_attribute_has_no_flags_that_nobody_knows(flags: int, known: bool) -> None:
    body = struct.pack("<II", 0, flags) + b"user.name\0"
    assert well_formed(Opcode.SETXATTR, memoryview(body)) == known


@pytest.mark.parametrize("opcode", [Opcode.READ, Opcode.READDIR, Opcode.READDIRPLUS])
def test_nobody_reads_more_than_a_reply_can_hold(opcode: Opcode) -> None:
    for size_bytes, fits in ((TRANSFER_MAX_BYTES, True), (TRANSFER_MAX_BYTES + 1, False)):
        body = struct.pack("<QQIIQII", 1, 0, size_bytes, 0, 0, 0, 0)
        assert well_formed(opcode, memoryview(body)) == fits
