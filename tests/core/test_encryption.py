"""What a SOURCE says of how it is encrypted, and what may be asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.encryption import (
    MARK_BYTES,
    Encryption,
    Lock,
    Way,
    encryption_like,
    ephemeral_mark,
    parse_encryption,
    parse_lock,
    way_of_mapping,
)
from kvfs.core.errors import KeyUnusable, UsageError
from kvfs.core.settings import Settings

UUID = "0f3c8f64-1a8a-4f5e-9d53-6d0f8c7e2b11"


def luks2(subsystem: bytes, uuid: bytes) -> bytes:
    """Return the head of a header of LUKS2, whose fields are at the places that its format says."""
    label, algorithm, salt = b"kvfs".ljust(48, b"\0"), b"sha256".ljust(32, b"\0"), bytes(64)
    head = b"LUKS\xba\xbe\x00\x02" + bytes(16) + label + algorithm + salt
    return head + uuid.ljust(40, b"\0") + subsystem.ljust(48, b"\0")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("ephemeral", Encryption(Way.EPHEMERAL)),
        ("tpm", Encryption(Way.TPM)),
        ("key-file=/etc/kvfs/kv.key", Encryption(Way.KEY_FILE, "/etc/kvfs/kv.key")),
        ("key-file=/a=b", Encryption(Way.KEY_FILE, "/a=b")),
    ],
)
def test_what_may_be_asked_for(text: str, found: Encryption | None) -> None:
    assert parse_encryption(text) == found
    assert found is None or found.text == text
    assert Settings.from_toml(f'encrypt = "{text}"').encrypt == text


@pytest.mark.parametrize(
    "text", ["key-file", "key-file=", "key-file=kv.key", "tpm=1", "ephemeral=", "aes", " tpm"]
)
def test_what_may_not(text: str) -> None:
    with pytest.raises(ValueError, match=r"ephemeral|absolute"):
        parse_encryption(text)
    with pytest.raises(UsageError, match="encrypt"):
        Settings.from_toml(f'encrypt = "{text}"')


def test_a_source_tells_how_it_is_encrypted() -> None:
    mark = ephemeral_mark(UUID)
    assert len(mark) == MARK_BYTES
    assert parse_lock(mark) == Lock(Way.EPHEMERAL, UUID)
    for way in (Way.KEY_FILE, Way.TPM):
        lock = Lock(way, UUID)
        assert parse_lock(luks2(lock.subsystem.encode(), UUID.encode())) == lock
        assert way_of_mapping(lock.mapping) is way
    assert parse_lock(luks2(b"", UUID.encode())) is None  # somebody else's
    assert parse_lock(luks2(b"kvfs-ephemeral", UUID.encode())) is None
    assert way_of_mapping("vg-lv") is None


@pytest.mark.parametrize("uuid", ["", UUID[:-1], UUID + "0"])
def test_a_header_whose_uuid_is_no_uuid_is_not_ours(uuid: str) -> None:
    assert parse_lock(luks2(Lock(Way.TPM, "").subsystem.encode(), uuid.encode())) is None


@given(st.binary(max_size=512), st.sampled_from([b"", ephemeral_mark("")[:16], luks2(b"", b"")]))
def test_no_bytes_are_taken_for_what_they_are_not(noise: bytes, head: bytes) -> None:
    """A UUID that is none would become the name of a mapping."""
    lock = parse_lock(head + noise)
    assert lock is None or set(lock.uuid) <= set("0123456789abcdef-")


def test_a_drive_that_joins_others_is_encrypted_as_they_are() -> None:
    key = Encryption(Way.KEY_FILE, "/etc/kvfs/kv.key")
    for plain in ([""], ["", ""], ["dm-crypt", "dm-crypt"], ["", "dm-crypt"], []):
        assert encryption_like(plain, None) is None
    assert encryption_like(["key-file", "key-file"], key) == key
    for asked in (None, Encryption(Way.EPHEMERAL)):
        assert encryption_like(["ephemeral"], asked) == Encryption(Way.EPHEMERAL)
    assert encryption_like(["tpm", "tpm"], None) == Encryption(Way.TPM)
    for lacking in (None, Encryption(Way.TPM)):
        with pytest.raises(KeyUnusable, match="not told the key file"):
            encryption_like(["key-file"], lacking)
    for unlike in (["ephemeral", ""], ["key-file", "tpm"], ["tpm", "dm-crypt"]):
        with pytest.raises(UsageError, match="not encrypted alike"):
            encryption_like(unlike, key)
