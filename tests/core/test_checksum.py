"""The checksum: Castagnoli, as another implementation computes it, and the residue it leaves."""

import crcmod.predefined
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.checksum import CRC32C_RESIDUE, crc32c

reference = crcmod.predefined.mkPredefinedCrcFun("crc-32c")


def test_the_check_value_of_the_standard() -> None:
    """RFC 3720, B.4, and the check value that every catalogue of CRCs lists."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0


@given(st.binary(max_size=300))
def test_equals_another_implementation(data: bytes) -> None:
    assert crc32c(data) == reference(data)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_goes_on_from_a_value(first: bytes, second: bytes) -> None:
    assert crc32c(second, crc32c(first)) == crc32c(first + second)


@given(st.binary(max_size=100), st.binary(max_size=50))
def test_bytes_and_their_checksum_leave_the_residue(data: bytes, before: bytes) -> None:
    value = crc32c(before)
    sealed = data + crc32c(data, value).to_bytes(4, "little")
    assert crc32c(sealed, value) == CRC32C_RESIDUE


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff" * 4])
def test_bytes_without_their_checksum_do_not(data: bytes) -> None:
    assert crc32c(data) != CRC32C_RESIDUE
